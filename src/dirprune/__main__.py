"""`python -m dirprune`, and the console command `dirprune`."""

import sys


def main() -> None:
    try:
        from dirprune.lab.cli import app
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] == "dirprune":
            raise
        sys.exit(f"the commands need the package {error.name}; install them with: pip install 'dirprune[lab]'")
    app(prog_name="dirprune")


if __name__ == "__main__":
    main()
