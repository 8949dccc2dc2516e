"""`costmodel explain`: what is replicated, sharded and sent, and what each figure rests on."""

from typing import Annotated

import typer

from costmodel.cli.options import Given, takes_run
from costmodel.cli.screen import json_text, screen

SCHEMA = 1


@takes_run
def explain(
    given: Given,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON (docs/report.md) instead of the text.", show_default=False)] = False,
) -> None:
    """Explain a run: what each axis divides, shards, copies and sends; bytes per parameter; how sure each figure is.

    Of the fullest rank role.
    """
    from costmodel.catalog.profiles import load_profile
    from costmodel.explain import constants
    from costmodel.explain import explain as explained
    from costmodel.prediction import predict
    resolved = given.resolve()
    with given.naming():
        profile = load_profile(resolved.run, given.profile)
        report = predict(resolved.run, profile, scaling=False)
        explanation = explained(resolved.run, report, profile)
        weights = constants(resolved.run, profile)
    if as_json:
        from dataclasses import asdict
        data = {"schema": SCHEMA, "run": resolved.run.model_dump(mode="json"), "profile": {"name": profile.name, "guess": profile.guess},
                "explanation": explanation.to_dict(), "constants": [asdict(w) for w in weights]}
        print(json_text(data), end="")
        return
    from costmodel.render.explain import render_explanation
    from costmodel.render.prediction import title
    page = screen(resolved.run)
    print(render_explanation(title(resolved.run), explanation, weights, report, page), end="")
