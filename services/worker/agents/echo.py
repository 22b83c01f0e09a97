"""The agent `echo`: gives the text back. For trying things out, and for measuring what everything else costs."""

from worker.agents import Asked, Attempt


class EchoAgent:
    """See the module."""

    async def answer(self, asked: Asked, attempt: Attempt) -> str:
        """Say the text again."""
        return attempt.say(asked.exchanges[-1].text)
