"""The same Run as `costmodel predict`, performed by PyTorch: on fake tensors (dry run) or for real."""


class TorchMissing(ImportError):
    """PyTorch is not installed; the message says what to install."""


def require_torch() -> None:
    """Raise TorchMissing, with the remedy, where PyTorch cannot be imported."""
    from importlib.util import find_spec
    if find_spec("torch") is None:
        raise TorchMissing("execute needs PyTorch 2.13, and it is not installed. Install it with: "
                           "pip install torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu")


def require_torch_or_refuse() -> None:
    """The same as a command's bad input."""
    from costmodel.cli.guard import InputError
    try:
        require_torch()
    except TorchMissing as error:
        raise InputError(str(error)) from None
