"""The compute loop over several models: what befalls one of them is not the others' affair."""

import threading
import time
from pathlib import Path

from engine.settings import EngineSettings
from engine.worker.engine_thread import EngineThread
from engine.worker.mailbox import Bells, Mailbox
from engine.worker.served_model import MAX_FAILURES_IN_A_ROW, ServedModel
from engine.worker.structure_desk import StructureDesk
from engine.worker.turnstile import Turnstile
from tests.engine.driver import create_driver, request
from tests.engine.fake_model import FakeModel, expected_output

BAD_TOKEN = 511
PROMPT = [1, 2, 3]


class Served:
    """A fake model on the thread, and what it has told."""

    def __init__(self, name: str, thread: EngineThread, bells: Bells) -> None:
        self.model = FakeModel()
        engine = create_driver(self.model).engine
        self.mailbox = Mailbox(engine.stats, bells)
        self.texts: dict[str, list[int]] = {}
        desk = StructureDesk(Path("none"), self.mailbox, EngineSettings())
        thread.add(ServedModel(name, engine, self.mailbox, desk))

    def until_ended(self, request_id: str, timeout_s: float = 10.0) -> None:
        """Read the news until a request's last frame."""
        deadline = time.monotonic() + timeout_s
        while True:
            for output in self.mailbox.take_news().outputs:
                for frame in output.frames.get("node", ()):
                    self.texts.setdefault(frame.request_id, []).extend(frame.token_ids)
                    if frame.request_id == request_id and frame.finish_reason:
                        return
            assert time.monotonic() < deadline, request_id
            time.sleep(0.002)


def test_a_model_that_fails_again_and_again_is_given_up_and_the_other_goes_on() -> None:
    bells, broken = Bells(), []
    thread = EngineThread(bells, Turnstile(), quantum_s=0.15)
    thread.on_broken = broken.append
    bad, good = Served("bad", thread, bells), Served("good", thread, bells)
    bad.model.fails_on_token = BAD_TOKEN
    running = threading.Thread(target=thread.run, daemon=True)
    running.start()
    good.mailbox.order(requests=[request("stream", PROMPT, 300)])
    for index in range(MAX_FAILURES_IN_A_ROW - 1):
        bad.mailbox.order(requests=[request(f"r{index}", [BAD_TOKEN], 5)])
        bad.until_ended(f"r{index}")
    assert broken == []
    bad.mailbox.order(requests=[request("last", [BAD_TOKEN], 5)])
    good.until_ended("stream")
    good.mailbox.order(requests=[request("after", PROMPT, 5)])
    good.until_ended("after")
    assert broken == ["bad"]
    assert good.texts["stream"] == expected_output(PROMPT, 300)
    assert good.texts["after"] == expected_output(PROMPT, 5)
    thread.stop()
    running.join(timeout=10)
    assert not running.is_alive()
