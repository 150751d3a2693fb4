"""Recommend a method and a penalty before training."""

from __future__ import annotations

from coterie._core.errors import SettingError
from coterie.engine.federation import Federation
from coterie.models.glm import Glm
from coterie.models.linear import Linear
from coterie.select.advice import Advice, conclude
from coterie.select.probe import checked, from_last_layer
from coterie.select.survey import Survey


def advise(fed: Federation, probe: int = 30) -> Advice:
    """Recommend a method and a penalty before training, for the federation and for every client.

    Parameters
    ----------
    fed
        The federation; it is left unchanged.
    probe
        Rounds of short training runs that check the advice on validation rows, if the model is not linear
        regression; 0 skips them.

    Returns
    -------
    Advice
        The recommendation, its reasons, and the estimates behind it.

    Raises
    ------
    SettingError
        If there is one client only, or the model is a network and there are no validation rows or probe rounds.

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
    if not isinstance(fed.model, Glm):
        return from_last_layer(fed, probe)
    advice = conclude(fed, Survey().carry_out(fed))
    if not isinstance(fed.model, Linear) and probe and fed.has_rows("validation"):
        return checked(fed, advice, probe)
    return advice
