"""What the emulator reports."""


class EmulatorError(RuntimeError):
    """A finding of the emulator; `seed` is that of the schedule which showed it (None until the run ends).

    `told`: its parts as plain values, where it has parts: explain.py says which.
    """

    seed: int | None = None

    def __init__(self, text: str = "", told: dict | None = None):
        super().__init__(text)
        self.told = told or {}

    def __str__(self):
        text = super().__str__()
        return text if self.seed is None else f"{text}\n  (schedule of seed {self.seed})"


class RaceError(EmulatorError):
    """Two conflicting accesses that nothing orders, or orders without the fence or the scope that it takes."""


class DeadlockError(EmulatorError):
    """Nothing can run, and somebody waits."""


class ProtocolError(EmulatorError):
    """A word used in a way that the hardware or the library's protocol leaves undefined."""
