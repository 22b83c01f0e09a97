"""Drills of the workers: killed, frozen and woken."""

import time

from harness.drills.scene import Scene

# A worker's death shows as a reset; the sidecar is welcomed elsewhere within a second or so.
KILLED_WITHIN_S = 3.0


async def worker_kill(scene: Scene) -> None:
    """A worker dies while a job runs, and another after the tool has ended and before the outcome is durable."""
    await _killed_while_running(scene)
    await _killed_before_durable(scene)


async def _killed_while_running(scene: Scene) -> None:
    machine = await scene.new_machine()
    user = machine.user
    async with scene.nobody_told_offline(user):
        job = scene.submit(user, "work", "running", held=True)
        await scene.began(job)
        worker = await scene.holder(user)
        session = (await scene.evidence.presence(user))["session"]
        scene.say(f"the tool runs; killing {worker.name} (SIGKILL)")
        cut_at = time.monotonic()
        await worker.kill()
        await scene.new_session(user, session)
        scene.recovered("killed while running", cut_at, time.monotonic(), within_s=KILLED_WITHIN_S)
        heir = await scene.holder(user)
        scene.say(f"{heir.name} holds the machine {time.monotonic() - cut_at:.2f} s after the kill")
        scene.check("the machine's worker", "another one", heir.name, is_met=heir is not worker)
        await scene.let_go(job)
        # The sidecar's hello listed the job as running: it is answered by job, and not sent again.
        answer = await scene.expect(job, "completed", executions=1, deliveries=1, attempts=1)
        scene.say(f"the tool has ended, answered {answer.at - cut_at:.2f} s after the kill")
    await worker.start()
    scene.say(f"{worker.name} is back")


async def _killed_before_durable(scene: Scene) -> None:
    machine = await scene.new_machine()
    user = machine.user
    job = scene.submit(user, "work", "ended", held=True)
    await scene.began(job)
    worker = await scene.holder(user)
    scene.say(f"the tool runs; freezing {worker.name}, so that it cannot take the result")
    await worker.freeze()
    await scene.let_go(job)
    await scene.eventually("the machine has logged the end", lambda: scene.events(user, "job_ended"))
    record = await scene.record(job)
    scene.check("the record before the kill", "processing", record.state)
    scene.say(f"the tool has ended, the outcome is not durable; killing {worker.name} (SIGKILL)")
    cut_at = time.monotonic()
    await worker.kill()
    answer = await job.caller
    scene.say(f"answered from the machine's journal, {answer.at - cut_at:.2f} s after the kill")
    scene.recovered("killed before durable", cut_at, answer.at, within_s=KILLED_WITHIN_S)
    await scene.expect(job, "completed", executions=1, deliveries=2, attempts=2)
    heir = await scene.holder(user)
    scene.check("the machine's worker", "another one", heir.name, is_met=heir is not worker)
    await worker.start()
    scene.say(f"{worker.name} is back")


async def worker_freeze(scene: Scene) -> None:
    """A worker freezes with an outcome in hand, loses its machine to another one, and wakes."""
    machine = await scene.new_machine()
    user, heartbeat_s = machine.user, scene.target.heartbeat_s
    job = scene.submit(user, "work", "in-hand", held=True)
    began_ms = await scene.began(job)
    worker = await scene.holder(user)
    before = await scene.evidence.presence(user)
    await scene.target.postgres.stop()
    await scene.let_go(job)
    await scene.answered(user, began_ms=began_ms)
    scene.say(f"the tool has ended, {worker.name} has its outcome and no Postgres; freezing it (SIGSTOP)")
    cut_at = time.monotonic()
    await worker.freeze()
    await scene.target.postgres.start()
    back_at = time.monotonic()
    answer = await job.caller
    scene.say(f"Postgres is back; answered through another worker, {answer.at - cut_at:.2f} s after the freeze")
    # A ping each heartbeat, two without a pong: the socket is given up. Then as after a kill.
    scene.recovered("frozen", back_at, answer.at, within_s=3 * heartbeat_s + KILLED_WITHIN_S)
    heir = await scene.holder(user)
    scene.check("the machine's worker", "another one", heir.name, is_met=heir is not worker)
    await worker.thaw()
    woken_ms = time.time() * 1000
    scene.say(f"{worker.name} wakes, with its old session and the outcome")

    await scene.logged(worker, "session_ended", session=before["session"])
    await scene.logged(worker, "outcome_late", job=(await scene.record(job)).job)
    scene.say("its session has stopped, and its outcome found the record ended")

    async def is_refreshed() -> bool:
        return int((await scene.evidence.presence(user)).get("seen", 0)) > woken_ms

    await scene.eventually("presence is refreshed", is_refreshed, within_s=3 * heartbeat_s + 1)
    now = await scene.evidence.presence(user)
    scene.check("presence after the wake", "the newer epoch", now["epoch"], is_met=now["epoch"] > before["epoch"])
    scene.check("the machine's worker after the wake", heir.name, (await scene.holder(user)).name)
    await scene.expect(job, "completed", executions=1, deliveries=2, attempts=2)
