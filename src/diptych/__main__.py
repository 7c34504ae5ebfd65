"""`python -m diptych`: what torchrun starts."""

from diptych.cli.main import run

if __name__ == "__main__":
    run()
