"""`steppe doctor`: what works on this machine, one line each.

Everything is tried out: a step in half precision, a captured step, a compiled function, the import of every optional
package. Imports run in another process, so that a crash is reported as one line too.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Annotated, Literal

import torch
import typer
from torch import nn

from ... import SAM, SharpnessAware, __version__, capture
from ...support.devices import best_device

State = Literal["ok", "no", "broken"]
SECONDS = 120  # for the imports of all packages together


@dataclass(frozen=True)
class Finding:
    """One line of the report: "ok" works, "no" is not available here, "broken" is installed and fails."""

    name: str
    state: State
    text: str


def examine() -> Iterator[Finding]:
    """All findings, one check after another. A check that fails is a finding too."""
    for name, check in CHECKS.items():
        try:
            yield from check()
        except Exception as error:
            yield Finding(name, "broken", first_line(error))


def first_line(error: BaseException) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


# The machine


def _python() -> Iterator[Finding]:
    yield Finding("Python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")


def _torch() -> Iterator[Finding]:
    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads, {os.cpu_count()} cores")


def _devices() -> Iterator[Finding]:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(i)
            size = f"{about.total_memory / 2**30:.0f} GiB, compute capability {about.major}.{about.minor}"
            yield Finding(f"CUDA device {i}", "ok", f"{about.name}, {size}")
    elif torch.version.cuda is None and torch.version.hip is None:
        yield Finding("CUDA", "no", "this torch is built without CUDA; everything but captured steps works on the CPU")
    else:
        yield Finding("CUDA", "no", "torch is built with CUDA, but there is no device, or no driver for it")
    if torch.backends.mps.is_available():
        yield Finding("MPS device", "ok", "Apple GPU")


def _half_precision() -> Iterator[Finding]:
    device = best_device()
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.float16, "fp16")):
        label = f"{name} autocast"
        try:
            taken = _step_in(dtype, device)
        except Exception as error:
            yield Finding(label, "broken", f"on {device}: {first_line(error)}")
            continue
        slow = device == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False)
        how = "works, but this device only emulates it: fp16 is faster" if slow else "works"
        how = how if taken else "runs, but the step was skipped"
        yield Finding(label, "ok" if taken else "broken", f"a SAM step with GradScaler on {device} {how}")


def _step_in(dtype: torch.dtype, device: str) -> bool:
    """Take one step of SAM in half precision, as the documentation shows; return whether it was taken, not skipped."""
    model, x, y = _problem(device)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model=model)
    scaler = torch.amp.GradScaler(device, init_scale=8.0)
    for _ in opt.passes(scaler):
        with torch.autocast(device, dtype):
            loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    return opt.steps == 1


def _captured_steps() -> Iterator[Finding]:
    device = best_device()
    model, x, y = _problem(device)
    opt = SharpnessAware(torch.optim.SGD(model.parameters(), lr=0.1), SAM(), model=model)
    step = capture(lambda x, y: nn.functional.mse_loss(model(x), y), opt)
    for _ in range(4):
        step(x, y)
    state: State = "ok" if step.how.startswith("replayed") else "no" if device == "cpu" else "broken"
    yield Finding("captured steps", state, step.how)


def _problem(device: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    with torch.random.fork_rng(devices=[]):
        model = nn.Linear(8, 1)
    return model.to(device), torch.ones(4, 8, device=device), torch.zeros(4, 1, device=device)


def _distributed() -> Iterator[Finding]:
    if not torch.distributed.is_available():
        yield Finding("distributed", "no", "this torch is built without torch.distributed: no DDP, no FSDP2")
        return
    found = [name for name in ("gloo", "nccl", "mpi", "ucc") if torch.distributed.is_backend_available(name)]
    if found:
        yield Finding("distributed", "ok", f"backends: {', '.join(found)}; DDP and FSDP2 are supported")
    else:
        yield Finding("distributed", "no", "torch.distributed has no backend here")


def _compile() -> Iterator[Finding]:
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(1))
    compilers = [os.environ.get("CXX", ""), "g++", "clang++", "cl"]
    compiler = next((name for name in compilers if name and shutil.which(name)), None)
    notes = [f"{compiler} compiles for the CPU" if compiler else "no C++ compiler for the CPU: install g++, or set CXX"]
    usable = compiler is not None
    if torch.cuda.is_available():
        triton = _version("triton")
        usable = triton is not None
        notes.append(f"triton {triton} compiles for CUDA" if usable else "no triton for CUDA: pip install triton")
    yield Finding("torch.compile", "ok" if usable else "no", "; ".join(notes))


# Optional packages

_FOR_DEVELOPERS = ("test", "docs", "benchmarks")  # extras that only steppe's developers need
_MODULES = {"scikit-learn": "sklearn", "pillow": "PIL"}  # packages whose module has another name
_REQUIREMENT = re.compile(r"""([\w.-]+).*;.*\bextra == ["']([\w-]+)["']""")


def optional_packages() -> dict[str, str]:
    """The packages that steppe's extras install, each with the smallest extra that installs it."""
    extras: dict[str, list[str]] = {}
    for line in metadata.requires("steppe") or []:
        found = _REQUIREMENT.match(line)
        if found and found[1] != "steppe" and found[2] not in _FOR_DEVELOPERS:
            extras.setdefault(found[2], []).append(found[1])
    by_size = sorted(extras, key=lambda extra: (len(extras[extra]), extra), reverse=True)
    smallest = {package: extra for extra in by_size for package in extras[extra]}
    return dict(sorted(smallest.items()))


def _packages() -> Iterator[Finding]:
    try:
        wanted = optional_packages()
    except metadata.PackageNotFoundError:
        yield Finding("extras", "no", "steppe is not installed, so its extras are not known: pip install -e .")
        return
    answers = try_imports([module_of(package) for package in wanted])
    for package, extra in wanted.items():
        version, error = _version(package), answers[module_of(package)]
        if error == _NOT_TRIED:
            yield Finding(
                package, "ok", f"{version or 'found'}; its import was not tried, because it needs torchvision"
            )
        elif error == _MISSING:
            yield Finding(package, "no", f'pip install "steppe[{extra}]"')
        elif error:
            yield Finding(package, "broken", f"{version or 'found'}, but {error}")
        else:
            yield Finding(package, "ok", version or "found")


def module_of(package: str) -> str:
    """The module of a package."""
    return _MODULES.get(package, package.replace("-", "_"))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


_MISSING, _NOT_TRIED = "missing", "not tried"
_MARK = "steppe doctor: "
# torchvision is not imported: a build that does not fit torch crashes.
_IMPORTS = f"""
import importlib, json, sys
sys.modules["torchvision"] = None
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        answer = ""
    except BaseException as error:
        named = (getattr(error, "name", None) or "").split(".")[0]
        missing = isinstance(error, ModuleNotFoundError)
        lines = str(error).strip().splitlines() or [""]
        answer = type(error).__name__ + ": " + lines[0]
        answer = {_NOT_TRIED!r} if missing and named == "torchvision" else answer
        answer = {_MISSING!r} if missing and named == name else answer
    print("\\n{_MARK}" + json.dumps([name, answer]), flush=True)
"""


def try_imports(modules: Sequence[str], seconds: float = SECONDS) -> dict[str, str]:
    """Import modules in another process: "" for each that works, else the error's first line, or how it ended."""
    answers: dict[str, str] = {}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    while waiting := [module for module in modules if module not in answers]:
        command = [sys.executable, "-W", "ignore", "-c", _IMPORTS, *waiting]
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=nowhere, text=True) as child:
            try:
                output, _ = child.communicate(timeout=seconds)
                end = f"its import ended the process (exit status {child.returncode})"
            except subprocess.TimeoutExpired:
                child.kill()
                output, _ = child.communicate()
                end = f"its import took longer than {seconds:g} s"
        lines = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
        answers.update(json.loads(line) for line in lines)
        left = [module for module in waiting if module not in answers]
        if left:
            answers[left[0]] = end  # this one was being imported; the rest get another process
    return answers


# Data


def _data() -> Iterator[Finding]:
    from ...lab.data import data_names, data_root

    where, given = data_root(), os.environ.get("STEPPE_DATA")
    source = "from STEPPE_DATA" if given else "STEPPE_DATA is not set"
    there = where.is_dir()
    yield Finding("data folder", "ok" if there else "no", f"{where} ({source}{'' if there else '; not there'})")
    listings = data_names()
    for listing in listings:
        if listing.found:
            yield Finding(f"data {listing.name}", "ok", listing.about)
    missing = [listing.name for listing in listings if not listing.found]
    if missing:
        yield Finding("other data", "no", f"{', '.join(missing)}; --download fetches those that may be downloaded")


CHECKS: dict[str, Callable[[], Iterator[Finding]]] = {
    "Python": _python,
    "torch": _torch,
    "CUDA": _devices,
    "half precision": _half_precision,
    "captured steps": _captured_steps,
    "distributed": _distributed,
    "torch.compile": _compile,
    "extras": _packages,
    "data": _data,
}


# The command

_COLOURS = {"ok": "green", "no": "yellow", "broken": "red"}
_MARKS = {"ok": "✓", "no": "–", "broken": "✗"}


def line_for(finding: Finding, encoding: str | None = "utf-8") -> tuple[str, str]:
    """The mark with its word, and the rest of the line. The word says the same as the colour."""
    mark = _MARKS[finding.state]
    try:
        mark.encode(encoding or "ascii")
    except UnicodeEncodeError:
        mark = "+" if finding.state == "ok" else "-" if finding.state == "no" else "x"
    return f"{mark} {finding.state:<6}", f"{finding.name:<18} {finding.text}"


def command(
    json_: Annotated[bool, typer.Option("--json", help="Print JSON, for programs and bug reports.")] = False,
) -> None:
    """Check what works on this machine: torch, devices, precisions, optional packages, data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about devices that it tried
        if json_:
            found = [asdict(finding) for finding in examine()]
            typer.echo(json.dumps({"steppe": __version__, "findings": found}, indent=1))
            return
        typer.echo(f"steppe {__version__}")
        for finding in examine():
            mark, rest = line_for(finding, sys.stdout.encoding)
            typer.echo(f"{typer.style(mark, fg=_COLOURS[finding.state])} {rest}")
