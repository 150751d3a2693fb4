"""Four hospitals, one table: does collaborating help, and a model for each."""

import coterie
from coterie.data import bundled

table = bundled.path("heart_disease")
result = coterie.compare(table, client="hospital", target="sick", seeds=1, rounds=50)
print(result.per_client().pivot("algorithm", index="client", values=result.metric))
print(result.verdict())

fed = coterie.Federation.from_table(table, client="hospital", target="sick")
run = coterie.fit(fed, coterie.algorithms.Ditto(lr=0.03, lam=0.3), rounds=50, select="best")
print(run.score("test", "accuracy"))
print(run.predict(table).head())
