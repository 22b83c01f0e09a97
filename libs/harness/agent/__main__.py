"""`python -m harness.agent --port N`: a stand-in agent as a process, until it gets SIGTERM or SIGINT."""

from harness.agent.server import Agent
from harness.stand_in import serve_until_stopped

if __name__ == "__main__":
    serve_until_stopped(Agent, __doc__ or "")
