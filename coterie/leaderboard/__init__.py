"""The leaderboard: methods x data sets x seeds under equal budgets, as JSON and as a page.

- `plan`: what is compared, and under which budget; `entries`: methods and data sets, those of the user included.
- `cell`: one method on one data set with one seed; `store`: finished cells, found again by what they depend on.
- `workers`: cells in processes of their own; `board`: run what is missing, and sum up.
- `summary`: numbers by cell, by method and data set, and over all; `charts`, `page`: pictures and the page.
"""

from coterie.leaderboard.board import Board, add, recheck, run

__all__ = ["Board", "add", "recheck", "run"]
