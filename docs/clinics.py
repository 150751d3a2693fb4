"""Write coterie/data/bundled/clinics.csv: generated patients of forty small clinics that have much to learn together.

    python docs/clinics.py coterie/data/bundled/clinics.csv

Every clinic has its own level and its own effect of age; all other effects are the same everywhere.
"""

from __future__ import annotations

import math
import random
import sys

CLINICS, FEWEST, MOST = 40, 25, 50


def lines() -> list[str]:
    """Return the lines of the table: clinic, seven features and the target `readmitted`."""
    draw = random.Random(2026)
    found = ["clinic,age,female,smoker,pressure,glucose,visits,ward,readmitted"]
    for clinic in range(1, CLINICS + 1):
        level, slope = draw.gauss(0, 0.8), draw.gauss(0.6, 0.4)
        for _ in range(draw.randint(FEWEST, MOST)):
            age, female, smoker = draw.gauss(64, 12), draw.random() < 0.5, draw.random() < 0.3
            pressure, glucose, visits = draw.gauss(132, 16), draw.gauss(105, 22), draw.randint(0, 6)
            ward = draw.choice(("surgery", "medicine", "emergency"))
            score = level + slope * (age - 64) / 12 + 1.1 * smoker - 0.3 * female
            score += 0.7 * (pressure - 132) / 16 + 0.9 * (glucose - 105) / 22 + 0.35 * (visits - 3)
            score += {"surgery": -0.6, "medicine": 0.0, "emergency": 0.8}[ward] - 0.3
            readmitted = draw.random() < 1 / (1 + math.exp(-1.5 * score))
            found.append(
                f"clinic {clinic:02d},{age:.0f},{'yes' if female else 'no'},{'yes' if smoker else 'no'},{pressure:.0f},"
                f"{glucose:.0f},{visits},{ward},{'yes' if readmitted else 'no'}"
            )
    return found


if __name__ == "__main__":
    with open(sys.argv[1], "w", encoding="utf-8", newline="\n") as file:
        file.write("\n".join(lines()) + "\n")
