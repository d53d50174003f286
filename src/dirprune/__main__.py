"""`python -m dirprune`, and the console command `dirprune`."""

import codecs
import io
import os
import sys


def main() -> None:
    try:
        from dirprune.lab.cli.app import app
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
    """Replace closed streams by os.devnull, and let streams without Unicode print similar ASCII characters."""
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
    """Replace characters that a stream cannot encode by similar ASCII ones."""
    assert isinstance(error, UnicodeEncodeError)
    return "".join(_PLAIN.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def _leave(code: int) -> None:
    """End one of several processes immediately.

    DDP keeps threads of torch.distributed alive that may still hold a tensor. If they release it after Python has shut
    down, they abort the process, and torchrun reports a complete run as failed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
