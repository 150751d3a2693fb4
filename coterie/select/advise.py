"""Recommend a method and a penalty before training."""

from __future__ import annotations

import dataclasses

from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.engine.privacy import Privacy
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.select.advice import Advice, conclude
from coterie.select.probe import checked, from_last_layer
from coterie.select.survey import MOST_COLUMNS, Survey
from coterie.train import private


def advise(fed: Federation, probe: int = 30, privacy: Privacy | None = None) -> Advice:
    """Recommend a method and a penalty before training, for the federation and for every client.

    Parameters
    ----------
    fed
        The federation; it is left unchanged.
    probe
        Rounds of short training runs that check the advice on validation rows, if the model is not linear
        regression; 0 skips them.
    privacy
        What the advice may cost of the privacy of rows (`unit="row"`); for linear regression with up to 300 features.

    Returns
    -------
    Advice
        The recommendation, its reasons, and the estimates behind it.

    Raises
    ------
    SettingError
        If there is one client only, the model is a network and there are no validation rows or probe rounds, or the
        model is another one than `privacy` is for.

    Examples
    --------
    >>> import coterie
    >>> fed = coterie.Federation.from_table("heart_disease", "hospital", "sick")
    >>> print(coterie.advise(fed, probe=0).text())  # doctest: +ELLIPSIS
    I cannot tell. If you must choose: rtfa with lambda = 1...
    - There are 4 clients with 120 rows each (median) and 33 features: 3.6 rows per feature.
    ...
    """
    fed = fed.fresh()
    fed.enter_round(0, None)
    if fed.n < 2:
        raise SettingError("advice needs at least two clients: with one there is nobody to collaborate with")
    if privacy is not None:
        require_protectable(fed)
        plan = {**private.as_plan(privacy), "rounds": 0}
        private.set_up(fed, Survey(), plan, private.new_secret())
        return from_survey(fed, privacy)
    if not isinstance(fed.model, Glm):
        return from_last_layer(fed, probe)
    advice = from_survey(fed)
    if not isinstance(fed.model, Linear) and probe and fed.has_rows("validation"):
        return checked(fed, advice, probe)
    return advice


def from_survey(fed: Federation, privacy: Privacy | None = None) -> Advice:
    """Return the advice that follows from the survey alone, and what it cost of the privacy of rows."""
    advice = conclude(fed, Survey().carry_out(fed))
    if privacy is None:
        return advice
    cost = (
        f"Privacy of every training row: epsilon at most {privacy.epsilon:g} with delta {privacy.delta:g}, for one "
        "noisy sum of squares and products per client (and the encoding of a table); the rest follows from these."
    )
    return dataclasses.replace(advice, why=[*advice.why, cost])


def require_protectable(fed: Federation) -> None:
    """Raise `SettingError` unless the survey of this model reads rows once, with noise."""
    if not isinstance(fed.model, Linear) or fed.model.d > MOST_COLUMNS or fed.n < 3:
        raise SettingError(
            f"advice with --epsilon is for linear regression with up to {MOST_COLUMNS} features and three clients or "
            "more: other models would be asked for gradients again and again"
        )
