"""`python -m dirprune`, and the console command `dirprune`."""

import codecs
import io
import os
import sys


def main() -> None:
    try:
        from dirprune.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "dirprune":
            raise
        sys.exit(
            f"the commands need the package {error.name}; in a clone of the repository, install them with: "
            "pip install -c constraints.txt -e '.[lab]'"
        )
    _mend_streams()
    try:
        app(prog_name="dirprune")
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(end.code, int):
            _leave(end.code)
        raise


def _mend_streams() -> None:
    """Let a stream that is closed take what it is given, and one with few letters replace those that it has not."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif isinstance(stream, io.TextIOWrapper) and "utf" not in stream.encoding.lower():
            codecs.register_error("plain", _in_plain_letters)
            stream.reconfigure(errors="plain")


_PLAIN = dict(zip("×–—−·ûℓ₁₂ᵢ", "x---*ul12i", strict=True)) | {
    "÷": "/",
    "±": "+-",
    "…": "...",
    "≤": "<=",
    "≥": ">=",
    "→": "->",
    "‖": "||",
    "²": "^2",
    "½": "1/2",
    "√": "sqrt ",
    "ᵀ": "^T",
    "μ": "mu",
    "λ": "lambda",
    "γ": "gamma",
    "σ": "sigma",
    "Δ": "Delta",
    "Σ": "sum ",
    "Π": "Pi",
}


def _in_plain_letters(error: UnicodeError) -> tuple[str, int]:
    """Replace what a stream has no letters for by what reads alike."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _leave(code: int) -> None:
    """End one of several processes at once.

    Threads of torch.distributed, which DDP keeps alive, may still have a tensor to give back. Where they come to it
    after Python has gone, they abort the process, and torchrun calls a run failed that is complete.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
