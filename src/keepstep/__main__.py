"""`python -m keepstep` is the command `keepstep`."""

from keepstep.cli.main import app

if __name__ == "__main__":
    app(prog_name="keepstep")
