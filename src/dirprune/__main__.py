"""`python -m dirprune`, and the console command `dirprune`."""

import os
import sys


def main() -> None:
    try:
        from dirprune.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "dirprune":
            raise
        sys.exit(f"the commands need the package {error.name}; install them with: pip install 'dirprune[lab]'")
    try:
        app(prog_name="dirprune")
    except SystemExit as end:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(end.code, int):
            _leave(end.code)
        raise


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
