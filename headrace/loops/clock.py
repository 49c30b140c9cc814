"""Where the seconds of a step went, as `time/<part>_s` metrics."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Laps:
    """Each `lap` ends a part and starts the next."""

    began_s: float = field(default_factory=time.perf_counter)
    last_s: float = field(default_factory=time.perf_counter)
    parts: dict[str, float] = field(default_factory=dict)

    def lap(self, part: str) -> float:
        now_s = time.perf_counter()
        spent_s, self.last_s = now_s - self.last_s, now_s
        self.parts[f"time/{part}_s"] = self.parts.get(f"time/{part}_s", 0.0) + spent_s
        return spent_s

    def values(self) -> dict[str, float]:
        return self.parts | {"time/step_s": self.last_s - self.began_s}
