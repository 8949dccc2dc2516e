#!/usr/bin/env bash
# Measure a list of runs on one GPU, one rank each (`execute solo`), for at most ten minutes; one record a run, fit to be committed.
#
#   benchmarks/gpu.sh [--list FILE] [--out FOLDER] [--minutes N] [--gpu NAME] [--site FOLDER]
#
#   --list     lines of NAME and arguments of `execute solo`.       benchmarks/gpu_runs.txt
#   --out      where NAME.json goes.                                benchmarks/measured/<gpu>-<date>
#   --minutes  no run begins after this, and the last one is ended. 10
#   --gpu      the device in the catalogue, where its own name is not found there
#   --site     a folder of Python packages beside the installed ones
#
# Needs python3 (or $PYTHON) with torch 2.11 or newer, numpy, pydantic, typer and PyYAML; no network. Where a package is missing, bring it:
#   pip install --target site pydantic typer PyYAML numpy     on a machine of the same Python, and give --site site.
# A run that does not fit, or fails, leaves a record that says so, and the next one begins. Exit code 1: no run gave a record.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
list="$root/benchmarks/gpu_runs.txt" out="" minutes=10 gpu="" site=""
while (($#)); do
    if [[ $1 == --* && $1 != --help ]] && (($# < 2)); then echo "gpu.sh: $1 needs a value" >&2; exit 2; fi
    case $1 in
        --list) list=$2 ;; --out) out=$2 ;; --minutes) minutes=$2 ;; --gpu) gpu=$2 ;; --site) site=$2 ;;
        -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"; exit 0 ;;
        *) echo "gpu.sh: $1 is no option; see --help" >&2; exit 2 ;;
    esac
    shift 2
done
python=${PYTHON:-python3}
export PYTHONPATH="$root${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1 PYTHONWARNINGS=ignore
started=$SECONDS deadline=$((SECONDS + minutes * 60))

if [[ ! -r $list ]]; then echo "gpu.sh: $list cannot be read" >&2; exit 2; fi
for package in torch numpy pydantic typer yaml; do
    "$python" -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$package') is None)" ||
        { echo "gpu.sh: $python has no $package. Bring it in a folder and give --site (see --help)." >&2; exit 2; }
done
found=$("$python" - "$gpu" 2>&1 <<'PY'
import sys
from execute.observe.environment import environment
from execute.suite import this_machine
here = environment()
print(f"on {here.accelerator}, torch {here.versions['torch']}")
print(this_machine(sys.argv[1]).gpu)
PY
)
gpu=${found##*$'\n'}
if [[ $gpu =~ [^a-z0-9_] ]]; then echo "gpu.sh: the device is not in the catalogue under its own name: give --gpu NAME. ($gpu)" >&2; exit 2; fi
echo "${found%$'\n'*}" >&2
out=${out:-$root/benchmarks/measured/$gpu-$(date -u +%Y%m%d)}
mkdir -p "$out" || exit 2

measured=0 ended_badly=0 left=0
while IFS= read -r line || [[ -n $line ]]; do
    line=${line%%#*}
    read -ra words <<<"$line"
    if ((${#words[@]} == 0)); then continue; fi
    name=${words[0]} remaining=$((deadline - SECONDS))
    if ((remaining <= 0)); then left=$((left + 1)); continue; fi
    begun=$SECONDS
    said=$(timeout --signal=INT --kill-after=20 "$remaining" "$python" -m execute solo --gpu "$gpu" --warmup 2 --steps 5 "${words[@]:1}" \
        --record "$out/$name.json" 2>&1 >/dev/null </dev/null)
    code=$?
    if ((code == 124)); then  # ended by the clock: neither a measurement nor a failure
        rm -f "$out/$name.json"
        left=$((left + 1))
    elif ((code == 0)); then measured=$((measured + 1)); else ended_badly=$((ended_badly + 1)); fi
    printf '%-22s exit %3d  %3d s  %s\n' "$name" "$code" $((SECONDS - begun)) "$( ((code)) && tail -n 1 <<<"$said" | cut -c1-150)"
done <"$list"
echo "$measured measured, $ended_badly ended badly, $left left out for lack of time; $((SECONDS - started)) s; records in $out"
if ((measured > 0)); then "$python" "$root/benchmarks/measured.py" "$out"; fi
((measured + ended_badly > 0)) && compgen -G "$out/*.json" >/dev/null
