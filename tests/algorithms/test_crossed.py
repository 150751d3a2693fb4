"""Hierarchical models of tables with several grouping columns: exactness, runtimes, what users do with a run."""

import numpy as np
import polars as pl
import pytest
import torch
from scipy import stats
from scipy.optimize import minimize
from scipy.special import expit

import coterie
from coterie import Federation, fit, models
from coterie._core.errors import DataError, SettingError
from coterie.algorithms import make
from coterie.algorithms.crossed_cells import layout
from coterie.cli.arguments import known_and_groups
from coterie.data.federated import Roles, describe
from coterie.data.grouping import decide
from coterie.deploy.federation_plan import RunRequest, connect, survey
from coterie.deploy.in_process import InProcessTransport
from coterie.deploy.loopback import LoopbackRuntime
from coterie.deploy.node_service import NodeService
from coterie.deploy.transport import NodeCaller
from coterie.models.description import description
from coterie.train.adapt import adapt


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def table(seed=0, kind="linear", students=24, lecturers=9, rows=12):
    """Ratings: students (clients, in schools) rate lecturers, with one feature."""
    rng = np.random.default_rng(seed)
    n = students * rows
    student, lecturer = np.repeat(np.arange(students), rows), rng.integers(0, lecturers, n)
    x = rng.normal(size=n)
    z = 0.4 + 0.7 * x + 0.8 * rng.normal(size=students)[student] + 0.8 * rng.normal(size=lecturers)[lecturer]
    z += np.array([-1.5, 0.5, 1.5, -0.5])[student % 4]
    y = {
        "linear": lambda: z + 0.6 * rng.normal(size=n),
        "logistic": lambda: np.where(rng.uniform(size=n) < expit(z), "yes", "no"),
        "poisson": lambda: rng.poisson(np.exp(0.5 * z)),
        "negative_binomial": lambda: rng.negative_binomial(2, 2 / (2 + np.exp(0.5 * z))),
        "ordinal": lambda: np.digitize(z + rng.logistic(size=n), [-1.0, 0.5, 2.0]),
    }[kind]()
    return pl.DataFrame(
        {
            "student": [f"s{k:02d}" for k in student],
            "lecturer": lecturer,
            "school": [f"school {k % 4}" for k in student],
            "x": x,
            "y": y,
        }
    )


def federation(frame, cluster=("lecturer", "school"), kind="linear", **options):
    model = getattr(models, kind)(intercept=True)
    task = "classification" if kind in ("logistic", "ordinal") else "regression"
    options = {"split": (1.0, 0.0, 0.0), "model": model, "task": task} | options
    return Federation.from_table(frame, "student", "y", cluster=list(cluster), **options)


def parts(fed, run):
    """Rows, targets, owners, and indicators of the levels of both factors, as the clients hold them."""
    rows = fed.runtime.rows("train")
    owner = torch.arange(fed.n).repeat_interleave(rows.size).numpy()
    names = fed.table.preprocessor.feature_names
    x = rows.x.numpy()
    pick = {
        key: [k for k, name in enumerate(names) if name.startswith(f"{key}=")]
        for key in ("lecturer", "school")
    }
    fixed = [names.index("x"), len(names)]  # the intercept comes after the features
    return x[:, fixed], rows.y.numpy(), owner, x[:, pick["lecturer"]], x[:, pick["school"]], fixed, pick


def test_least_squares_is_the_dense_mixed_model():
    """Variances where the likelihood of the dense covariance matrix is flat; models are its predictions."""
    fed = federation(table())
    run = fit(fed, make("hierarchical", effects="intercept"), rounds=2)
    assert run.state.done
    x, y, owner, one, other, fixed, pick = parts(fed, run)
    same = owner[:, None] == owner[None]
    blocks = [np.eye(len(y)), same, one @ one.T, other @ other.T]

    def deviance(logs):
        v = sum(np.exp(log) * block for log, block in zip(logs, blocks, strict=True))
        solved = np.linalg.solve(v, np.column_stack([x, y]))
        beta = np.linalg.solve(x.T @ solved[:, :2], x.T @ solved[:, 2])
        left = y - x @ beta
        return np.linalg.slogdet(v)[1] + left @ np.linalg.solve(v, left), beta, np.linalg.solve(v, left)

    values = run.state.variances.numpy()
    logs = np.log(values)
    slope = np.array(
        [(deviance(logs + 1e-4 * e)[0] - deviance(logs - 1e-4 * e)[0]) / 2e-4 for e in np.eye(4)]
    )
    off = np.linalg.solve(2 * run.state.information.numpy(), slope)
    spread = np.sqrt(np.diag(np.linalg.inv(run.state.information.numpy())))
    assert np.abs(off / spread).max() < 1e-4  # standard deviations from the maximum
    _, beta, left = deviance(logs)
    personal = run.personal.numpy()
    assert np.abs(personal[:, fixed[0]] - beta[0]).max() < 1e-6
    own = np.array([values[1] * left[owner == k].sum() for k in range(fed.n)])
    assert np.abs(personal[:, fixed[1]] - beta[1] - own).max() < 1e-5
    assert np.abs(personal[:, pick["lecturer"]] - values[2] * one.T @ left).max() < 1e-5
    assert np.abs(personal[:, pick["school"]] - values[3] * other.T @ left).max() < 1e-5


def dense_laplace(x, y, owner, one, other, values, start, poisson):
    """-2 log likelihood by Laplace's approximation with all effects in one dense Newton iteration, and the mode."""
    clients = (owner[:, None] == np.arange(owner.max() + 1)).astype(float)
    w = np.column_stack([x, clients, one, other])
    sizes = [clients.shape[1], one.shape[1], other.shape[1]]
    precision = np.concatenate([[0, 0], np.repeat(1 / np.asarray(values), sizes)])
    t = start.copy()
    for _ in range(60):
        eta = w @ t
        mean = np.exp(eta) if poisson else expit(eta)
        h = mean if poisson else mean * (1 - mean)
        bent = w.T @ (h[:, None] * w) + np.diag(precision)
        step = np.linalg.solve(bent, w.T @ (y - mean) - precision * t)
        t = t + step * min(1.0, 2.0 / np.abs(step).max())
    eta = w @ t
    loss = (np.exp(eta) - y * eta) if poisson else np.logaddexp(0, eta) - y * eta
    inner = bent[2:, 2:] / precision[2:]
    return 2 * loss.sum() + precision @ t**2 + np.linalg.slogdet(inner)[1], t


@pytest.mark.quick("logistic")
@pytest.mark.parametrize("kind", ["logistic", "poisson"])
def test_classes_and_counts_are_those_of_a_dense_laplace_approximation(kind):
    fed = federation(table(2, kind, students=14, lecturers=8), kind=kind)
    run = fit(fed, make("hierarchical", effects="intercept"), rounds=2)
    assert run.state.done
    x, y, owner, one, other, fixed, pick = parts(fed, run)
    start = np.zeros(2 + fed.n + one.shape[1] + other.shape[1])

    def deviance(logs):
        return dense_laplace(x, y, owner, one, other, np.exp(logs), start, kind == "poisson")

    values = run.state.variances.numpy()[1:]
    height, mode = deviance(np.log(values))
    constant = 2 * float(torch.lgamma(torch.from_numpy(y) + 1).sum()) if kind == "poisson" else 0.0
    assert run.state.deviance == pytest.approx(height + constant, abs=1e-4)
    assert np.abs(run.personal[0, fixed].numpy() - mode[:2] - [0, mode[2]]).max() < 1e-4
    assert (
        np.abs(run.personal[0, pick["lecturer"]].numpy() - mode[2 + fed.n : 2 + fed.n + one.shape[1]]).max()
        < 1e-4
    )
    best = minimize(
        lambda logs: deviance(logs)[0], np.log(values), method="Nelder-Mead", options={"fatol": 1e-6}
    )
    spread = np.sqrt(np.diag(np.linalg.inv(run.state.information.numpy())))
    assert (np.abs(best.x - np.log(values)) / spread).max() < 5e-3
    assert deviance(np.log(values))[0] < best.fun + 1e-4


def _log_chances(kind, z, y, extras):
    """Log likelihood of every row: scipy's for counts, differences of logistic functions for ordered classes."""
    if kind == "negative_binomial":
        shape = np.exp(-extras[0])
        return stats.nbinom.logpmf(y, shape, shape / (shape + np.exp(z)))
    cuts = np.concatenate([[-np.inf, 0.0], np.exp(extras).cumsum(), [np.inf]])
    return np.log(expit(z - cuts[y.astype(int)]) - expit(z - cuts[y.astype(int) + 1]))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["negative_binomial", "ordinal"])
def test_dispersions_and_cut_points_are_those_of_a_dense_laplace_approximation(kind):
    """All effects in one dense Newton iteration, with derivatives of rows by differences."""
    fed = federation(table(2, kind, students=14, lecturers=8), kind=kind)
    run = fit(fed, make("hierarchical", effects="intercept"), rounds=2, evaluate_every=0)
    assert run.state.done
    x, y, owner, one, other, fixed, _ = parts(fed, run)
    clients = (owner[:, None] == np.arange(fed.n)).astype(float)
    w = np.column_stack([x, clients, one, other])
    sizes = [clients.shape[1], one.shape[1], other.shape[1]]

    def deviance(point):
        values, extras = np.exp(point[:3]), point[3:]
        precision, t = np.concatenate([[0, 0], np.repeat(1 / values, sizes)]), np.zeros(w.shape[1])
        for _ in range(40):
            up, here, down = (_log_chances(kind, w @ t + step, y, extras) for step in (1e-4, 0.0, -1e-4))
            slope, h = (up - down) / 2e-4, -(up + down - 2 * here) / 1e-8
            bent = w.T @ (h[:, None] * w) + np.diag(precision)
            move = np.linalg.solve(bent, w.T @ slope - precision * t)
            t = t + move * min(1.0, 2.0 / np.abs(move).max())
            if np.abs(move).max() < 1e-6:
                break
        volume = np.linalg.slogdet(bent[2:, 2:] / precision[2:])[1]
        return precision @ t**2 + volume - 2 * _log_chances(kind, w @ t, y, extras).sum(), t

    extras = run.state.x[-len(layout(fed).extras) :].numpy()
    found = np.concatenate([np.log(run.state.variances.numpy()[1:]), extras])
    height, mode = deviance(found)
    assert run.state.deviance == pytest.approx(height, abs=2e-3)
    assert np.abs(run.personal[0, fixed].numpy() - mode[:2] - [0, mode[2]]).max() < 1e-3
    assert np.abs(run.personal[:, -len(extras) :].numpy() - extras).max() < 1e-12, "extras are common"
    slope, bent = _slopes(lambda point: deviance(point)[0], found)
    off = np.linalg.solve(bent, slope)
    assert np.sqrt(0.5 * slope @ off) < 2e-2, "standard deviations from the maximum"
    spread = np.sqrt(np.diag(np.linalg.inv(0.5 * bent)))[:3]
    ours = np.sqrt(np.diag(np.linalg.inv(run.state.information.numpy())))
    assert np.abs(ours / spread - 1).max() < 0.05, "intervals know that the extras are estimated"
    assert set(run.tests()) == {"clients differ", "lecturer differs", "school differs"}


def _slopes(function, point, step=0.05):
    """First and second derivatives by differences."""
    moves = step * np.eye(len(point))
    slope = np.array([function(point + m) - function(point - m) for m in moves]) / (2 * step)
    bent = [
        [sum(i * j * function(point + i * a + j * b) for i in (1, -1) for j in (1, -1)) for b in moves]
        for a in moves
    ]
    return slope, np.array(bent) / (4 * step**2)


@pytest.mark.quick("linear")
@pytest.mark.parametrize("kind", ["linear", "logistic"])
def test_every_runtime_gives_the_same(kind, tmp_path):
    """One client at a time, three nodes that exchange bytes, and three nodes with tables of their own."""
    frame, groups = table(3, kind, students=8, lecturers=3, rows=10), ("lecturer", "school")
    if kind == "logistic":  # hundreds of messages
        frame, groups = frame.drop("school"), ("lecturer",)
    method = make("hierarchical", effects="intercept")
    whole = fit(federation(frame, groups, kind), method, rounds=2)
    if kind == "linear":
        alone = fit(federation(frame, groups, loop=True), method, rounds=2)
        assert (alone.personal - whole.personal).abs().max() < 1e-5
    nodes = federation(frame, groups, kind)
    nodes.runtime = LoopbackRuntime.of(nodes, 3)
    apart = fit(nodes, method, rounds=2)
    assert (apart.personal - whole.personal).abs().max() < 1e-5
    assert apart.state.variances.allclose(whole.state.variances, rtol=1e-4)

    names = sorted(frame["student"].unique())
    services = {
        f"node {k}": NodeService(frame.filter(pl.col("student").is_in(names[k::3])), tmp_path / str(k))
        for k in range(3)
    }
    caller = NodeCaller(InProcessTransport(services))
    roles = Roles("student", "y", groups=groups)
    model = description(getattr(models, kind)(intercept=True))
    request = RunRequest(roles, split=(1.0, 0.0, 0.0), model=model)
    plan = survey(caller, {name: [] for name in services}, request, "conformance")
    remote = connect(caller, plan, method)
    assert remote.table.preprocessor.feature_names == whole.fed.table.preprocessor.feature_names
    run = fit(remote, method, rounds=2)
    assert (run.state.x - whole.state.x).abs().max() < 1e-5
    kept = {
        name: service.runs["conformance"].models(run.deployed_round) for name, service in services.items()
    }
    for name, ids in plan.nodes.items():
        assert (kept[name] - whole.personal[ids]).abs().max() < 1e-5
    assert {entry.phase for entry in run.fed.ledger.entries} >= {"cells", "adjust"}


def test_predict_save_export_adapt(tmp_path):
    """A new row of a known level gets the level's effect, one of an unknown level none, and files keep all of it."""
    frame = table(4)
    known = frame.filter(pl.col("student") != "s00")
    run = fit(federation(known), make("hierarchical", effects="intercept"), rounds=2, out=tmp_path / "run")
    some = known.head(3).with_columns(pl.lit(99).alias("lecturer"))
    names = run.fed.table.preprocessor.feature_names
    scale = run.fed.table.target_scale
    gap = np.array(run.predict(known.head(3))["prediction"]) - np.array(run.predict(some)["prediction"])
    effects = [
        scale * float(run.state.x[names.index(f"lecturer={level}")]) for level in known.head(3)["lecturer"]
    ]
    assert np.abs(gap - effects).max() < 1e-9 and np.abs(effects).min() > 0
    loaded = coterie.load(tmp_path / "run")
    assert torch.equal(loaded.personal, run.personal)
    assert loaded.predict(known.head(5)).equals(run.predict(known.head(5)))
    run.export("csv", run.fed.names[0], tmp_path / "one.csv")
    assert "lecturer=3" in (tmp_path / "one.csv").read_text()
    new = frame.filter(pl.col("student") == "s00")
    adapted = adapt(tmp_path / "run", new).predictor
    everybody = fit(federation(frame), make("hierarchical", effects="intercept"), rounds=2)
    again = np.array(everybody.predict(new)["prediction"])
    before, after = (np.array(one(new)["prediction"]) for one in (run.predict, adapted))
    assert np.sqrt(np.mean((after - again) ** 2)) < 0.2 * np.sqrt(np.mean((before - again) ** 2)) + 0.02


def test_adapted_models_are_conditional_means_given_the_levels(tmp_path):
    """A newcomer's intercept is its shrunken mean residual, by hand."""
    frame = table(4)
    run = fit(
        federation(frame.filter(pl.col("student") != "s00")),
        make("hierarchical", effects="intercept"),
        rounds=2,
        out=tmp_path / "run",
    )
    new = frame.filter(pl.col("student") == "s00")
    found = adapt(tmp_path / "run", new)
    encoding = run.fed.table.preprocessor
    x = torch.cat([encoding.encode(new), torch.ones(len(new), 1)], 1).double()
    left = encoding.encode_target(new) - x @ run.state.x
    noise, clients = run.state.variances[:2]
    expected = run.state.x[-1] + left.sum() / (len(new) + noise / clients)
    assert float(found.models[0, -1]) == pytest.approx(float(expected), abs=1e-6)
    assert (found.models[0, :-1] - run.state.x[:-1]).abs().max() < 1e-9


def test_labels_that_repeat_are_paired():
    """Class 1 of school a is not class 1 of school b: `school:class`, whose parts are no features."""
    rng = np.random.default_rng(2)
    school, room = rng.integers(0, 5, 400), rng.integers(0, 3, 400)
    effect = rng.normal(size=(5, 3))
    frame = pl.DataFrame(
        {
            "student": [f"s{k % 40}" for k in range(400)],
            "school": school,
            "class": room,
            "x": rng.normal(size=400),
            "y": effect[school, room] + 0.3 * rng.normal(size=400),
        }
    )
    run = fit(
        federation(frame, ["school", "school:class"]), make("hierarchical", effects="intercept"), rounds=1
    )
    names = run.fed.table.preprocessor.feature_names
    assert "school:class=3:2" in names and "class" not in names
    assert layout(run.fed).sizes == (5, 15)
    values = dict(zip(["noise", "clients", "school", "pair"], run.state.variances.tolist(), strict=True))
    assert values["pair"] > 5 * values["noise"]
    assert np.abs(np.array(run.predict(frame)["prediction"]) - effect[school, room]).mean() < 0.15


def test_other_methods_take_the_finest_column_that_contains_clients():
    """And the grouping columns are categories to them."""
    fed = federation(table(7), ["lecturer", "school"])
    assert fed.cluster_names == [f"school {k}" for k in range(4)]
    run = fit(fed, make("oracle", steps=2), rounds=2)
    assert run.personal.shape == (24, 1 + 9 + 4 + 1)
    alone = federation(table(7).drop("school"), ["lecturer"])
    assert alone.clusters is None
    with pytest.raises(SettingError, match="needs known clusters"):
        fit(alone, make("oracle"), rounds=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"covariance": "full"}, "covariance = 'full'"),
        ({"noise": "client"}, "noise = 'client'"),
        ({"tails": "t"}, "tails = 't'"),
        ({"choose": "moments"}, "choose = 'moments'"),
    ],
)
def test_what_is_not_offered_is_refused(settings, said):
    with pytest.raises(SettingError, match=f"{said} is not offered with several grouping columns"):
        fit(federation(table(8)), make("hierarchical", **settings), rounds=1)


def test_softmax_is_refused():
    frame = table(8).with_columns(pl.Series("y", ["a", "b", "c"] * 96))
    with pytest.raises(SettingError, match="one predictor per row"):
        fit(federation(frame, model=None, task=None), make("hierarchical"), rounds=1)


def test_intervals_tests_and_what_is_recorded():
    fed = federation(table(5, students=30, lecturers=12))
    run = fit(fed, make("hierarchical", effects="intercept"), rounds=1)
    found = run.variances(0.9)
    assert found["variance"].to_list() == ["noise", "clients", "lecturer", "school"]
    assert ((found["lower"] < found["estimate"]) & (found["estimate"] < found["upper"])).all()
    chances = run.tests()
    assert set(chances) == {"clients differ", "lecturer differs", "school differs"}
    assert chances["lecturer differs"] < 1e-6 and 0 <= chances["school differs"] <= 1
    recorded = run.algorithm.observe(run.fed, run.state)
    mean, scale = fed.table.preprocessor.target_mean, fed.table.target_scale
    assert scale > 1.2 and found["coefficients"].to_list() == ["", "(intercept)", "", ""]
    assert float(recorded["sd lecturer"]) == pytest.approx(found["estimate"][2] ** 0.5), "units of the target"
    effects = run.effects(0.9)
    levels = effects.filter(pl.col("client") == "(all)")
    assert len(levels) == 16 and effects.filter(pl.col("client") == "s03")["coefficient"].to_list() == [
        "x",
        "(intercept)",
    ]
    own = effects.filter(pl.col("coefficient") == "(intercept)")
    assert np.abs(own["estimate"].to_numpy() - (mean + scale * run.personal[:, -1]).numpy()).max() < 1e-3
    assert (own["lower"] < own["estimate"]).all() and own["shrinkage"].is_between(0, 1).all()
    frame = table(5, students=30, lecturers=12)
    known = run.intervals(0.9).predict(frame)
    inside = (known["lower"] < frame["y"]) & (frame["y"] < known["upper"])
    assert 0.85 < inside.mean() < 0.99


@pytest.mark.slow
def test_slopes_that_differ_between_clients():
    """`slopes` and effects = "auto": the feature's coefficient differs where the rows say so."""
    rng = np.random.default_rng(3)
    frame = table(9, students=30)
    slope = dict(zip(sorted(frame["student"].unique()), 0.4 * rng.normal(size=30), strict=True))
    bent = frame.with_columns(y=pl.col("y") + pl.col("x") * pl.col("student").replace_strict(slope))
    for settings in ({"slopes": "x"}, {}):
        run = fit(federation(bent), make("hierarchical", **settings), rounds=1)
        assert (
            run.state.client_groups.tolist() == [1, 0]
            if settings
            else len(run.state.client_groups.unique()) == 2
        )
        names = ["clients: x", "clients: intercept"][:: -1 if settings else 1]
        assert run.variances()["variance"].to_list()[1:3] == names
        assert "sd clients: x" in run.algorithm.observe(run.fed, run.state)
        assert (
            run.variances()["coefficients"].to_list()[1:3] == ["x", "(intercept)"][:: -1 if settings else 1]
        )
        own = run.personal[:, 0].numpy()
        assert np.corrcoef(own, [slope[name] for name in run.fed.names])[0, 1] > 0.9
    plain = fit(federation(frame), make("hierarchical"), rounds=1)
    assert float(plain.personal[:, 0].std()) < 0.3 * float(run.personal[:, 0].std())


def test_commands_print_export_and_report_it(command, tmp_path):
    """The command line from --cluster twice to an ONNX file, which predicts as `coterie predict` does."""
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    frame, file, folder = table(5, students=8, lecturers=4), tmp_path / "ratings.csv", tmp_path / "run"
    frame.write_csv(file)
    roles = ["--client", "student", "--target", "y", "--cluster", "lecturer", "--cluster", "school"]
    done = command("fit", file, *roles, "--algorithm", "hierarchical", "--rounds", 2, "--out", folder)
    told = " ".join(f"{done.out} {done.err}".split())
    assert done.code == 0 and "sd lecturer" in told and "'lecturer' is crossed with clients: 8 of 8" in told
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Where outcomes differ" in page and "--cluster lecturer --cluster school" in page
    model = tmp_path / "one.onnx"
    assert command("export", folder, "--client", "s03", "--to", "onnx", "--out", model).code == 0
    mine = frame.filter(pl.col("student") == "s03")
    session = runtime.InferenceSession(str(model), providers=["CPUExecutionProvider"])
    feed = {
        entry.name: mine[entry.name].cast(pl.Float64).to_numpy().reshape(-1, 1)
        if entry.type == "tensor(double)"
        else np.array(mine[entry.name].cast(pl.String).to_list(), dtype=object).reshape(-1, 1)
        for entry in session.get_inputs()
    }
    assert set(feed) == {"x", "lecturer", "school"}
    assert (
        np.abs(session.run(["prediction"], feed)[0] - coterie.load(folder).predict(mine)["prediction"]).max()
        < 1e-6
    )


def test_counts_of_a_table_are_predicted_as_counts():
    """Many different counts are no classes, and are neither standardised nor converted to other units."""
    frame = table(12, "poisson").with_columns(pl.col("y") * 3 + pl.col("y") // 2)
    run = fit(federation(frame, ["lecturer"], "poisson"), make("hierarchical", effects="intercept"), rounds=1)
    predicted = np.array(run.predict(frame)["prediction"])
    assert predicted.min() > 0 and predicted.mean() == pytest.approx(frame["y"].mean(), rel=0.05)


def test_a_node_refuses_known_clusters_that_cut_through_clients():
    with pytest.raises(
        DataError, match=r"several clusters of column 'lecturer'.*--cluster lecturer --cluster"
    ):
        describe(table(1), Roles("student", "y", cluster="lecturer"), "node.csv")


def test_a_column_that_is_named_twice_is_crossed():
    """The remedy for nodes, which cannot see how the clients of others have their rows."""
    assert known_and_groups(["lecturer"]) == ("lecturer", ())
    assert known_and_groups(["lecturer", "lecturer"]) == (None, ("lecturer",))
    known, groups, _ = decide(table(1), "student", ["school", "school"])
    assert known is None and groups == ("school",)
    fed = federation(table(1), ["school", "school"])
    assert layout(fed).names == ("school",) and fed.table.preprocessor.spec.groups == ("school",)
