"""Theory as functions of numbers: what the papers prove, with misprints corrected.

- `risk`, `filters`, `monte_carlo`: risks of personalised linear models, predicted, exact and simulated; `ridge_limits`,
  `learned_centre`, `spectrum`: the terms that predictions consist of.
- `cluster_penalty`, `hierarchical`, `variance_components`, `coins`: penalty, exact minimisers and step sizes for known
  clusters; `linear_estimators`: exact estimators to compare with.
- `threshold`, `threshold_rules`, `threshold_starts`, `cluster_count`, `cluster_quality`: finding clusters, and how good
  they are.
- `collaboration`, `simplex`, `sketch`, `groups`: weights between clients, projections, sums by cluster.
- `flix`, `flix_steps`, `flix_rates`, `flix_rounds`, `flix_bounds`, `flix_nonconvex`: constants, step sizes, rates,
  rounds and bounds of FLIX; `flix_risk`: its risk in the linear model. `crossover`: where one risk undercuts another.
- `held_out`, `left_out`: errors predicted from training rows alone, for the advisor.
- `ranking`: ranks of methods over data sets, Friedman's test, the critical difference, Pareto fronts.
- `verdicts`: which of two models is better for whom, by paired losses; a guard for clients that would be harmed.
"""
