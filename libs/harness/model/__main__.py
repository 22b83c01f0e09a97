"""`python -m harness.model --port N`: a stand-in model as a process, until it gets SIGTERM or SIGINT."""

from harness.model.server import Model
from harness.stand_in import serve_until_stopped

if __name__ == "__main__":
    serve_until_stopped(Model, __doc__ or "")
