"""`python -m dirprune`, and the console command `dirprune`."""

import io
import os
import sys


def main() -> None:
    try:
        from dirprune.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "dirprune":
            raise
        sys.exit(f"the commands need the package {error.name}; install them with: pip install 'dirprune[lab]'")
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
            stream.reconfigure(errors="replace")


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
