"""Tables of README and documentation from result lines that were made up."""

from __future__ import annotations

import json

import pytest

from benchmarks import claims, readme, report, time_to_quality
from tests.benchmarks.support import result, results

TRACES = {
    "gpytorch tuned": [[5.0, 0.5, 0.3], [10.0, 0.2, 0.2]],
    "gpytorch tutorial": [[5.0, 0.9, 0.4], [20.0, 0.3, 0.25]],
    "t-svgp": [[1.0, 0.4, 0.3], [2.0, 0.1, 0.2], [3.0, 0.3, 0.2]],
    "svgp": [[1.0, 0.9, 0.3], [4.0, 0.25, 0.2]],
}


def lines(**more):
    made = {"experiment": "quality", "dataset": "kin40k", "num_inducing": 256, "split": 0, "seed": 0, **more}
    made.setdefault("config", {"epochs": 30})
    return [{**made, "method": method, "trace": trace} for method, trace in TRACES.items()]


# -- quality against time ----------------------------------------------------------------------------------------------


def test_a_picture_per_data_set_has_the_best_so_far_of_each_method(tmp_path):
    drawn = time_to_quality.draw([*lines(), *lines(dataset="protein")], tmp_path)
    assert [path.name for path in drawn] == ["kin40k.png", "protein.png"]
    assert all(path.stat().st_size > 5000 for path in drawn)
    (axes,) = time_to_quality.picture(time_to_quality.by_dataset(lines())["kin40k"], "kin40k").axes
    shown = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert shown["T-SVGP"] == [[1.0, 0.4], [2.0, 0.1]]
    assert shown["GPyTorch SVGP, tuned"] == [[5.0, 0.5], [10.0, 0.2]]


def test_the_share_of_a_peers_time_is_when_its_final_density_is_first_reached():
    methods = time_to_quality.by_dataset(lines())["kin40k"]
    (tuned,), (tutorial,) = methods["gpytorch tuned"], methods["gpytorch tutorial"]
    assert time_to_quality.share(methods, "t-svgp", tuned) == 0.2
    assert time_to_quality.share(methods, "svgp", tuned) is None
    assert time_to_quality.share(methods, "svgp", tutorial) == 0.2
    rows = time_to_quality.scores(methods).splitlines()
    assert "T-SVGP (30 epochs) is there after" in rows[0]
    assert [cell.strip() for cell in rows[2].split("|")[1:-1]] == [
        "GPyTorch SVGP, tuned",
        "30",
        "10.0",
        "0.2000",
        "0.2000",
        "0.20",
        "never",
    ]


def test_without_lines_or_picture_nothing_is_said(tmp_path):
    assert time_to_quality.headline([], tmp_path) == time_to_quality.section([], tmp_path) == ""
    assert time_to_quality.headline(lines(), tmp_path) == ""
    time_to_quality.draw(lines(), tmp_path)
    assert "after 0.20 of its time" in time_to_quality.headline(lines(), tmp_path)
    assert time_to_quality.headline(lines(dataset="bike"), tmp_path) == ""


def test_of_several_runs_of_a_method_the_first_split_and_most_common_size_are_shown():
    other = [{**line, "num_inducing": 512} for line in lines()[:1]]
    later = [{**line, "trace": [[9.0, 9.0, 9.0]]} for line in lines(split=1)]
    methods = time_to_quality.by_dataset([*later, *other, *lines()])["kin40k"]
    assert {name: line["trace"] for name, (line,) in methods.items()} == TRACES


def test_of_several_budgets_the_picture_has_the_best_and_the_table_the_one_that_most_have():
    quick = {**lines()[2], "config": {"epochs": 10}, "trace": [[0.5, 0.35, 0.3], [0.6, 0.28, 0.2]]}
    methods = time_to_quality.by_dataset([*lines(), quick])["kin40k"]
    assert time_to_quality.envelope(methods["t-svgp"]) == [(0.5, 0.35), (0.6, 0.28), (2.0, 0.1)]
    assert time_to_quality.usual(methods) == 30
    assert time_to_quality.share(methods, "t-svgp", methods["gpytorch tutorial"][0]) == 0.1
    assert time_to_quality.scores(methods).count("\n| T-SVGP ") == 2


def test_lines_of_quality_and_versions_are_no_part_of_the_report(tmp_path):
    every = [*lines(), {"experiment": "versions", "which": "tested"}, *results()]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in every))
    assert {one["experiment"] for one in report.load([tmp_path])} == {"uci"}


# -- the tables of the README ------------------------------------------------------------------------------------------


def test_a_row_per_data_set_with_most_pairs_then_most_inducing_points():
    large = [{**one, "num_inducing": 512} for one in results() if one["split"] < 2]
    many = [{**one, "num_inducing": 300} for one in results()]
    elsewhere = [{**one, "dataset": "mine"} for one in results()]
    text = readme.headline([*results(), *large, *many, *elsewhere])
    rows = [line.split("|")[1:4] for line in text.splitlines()[2:] if line.startswith("| kin")]
    assert [[cell.strip() for cell in row] for row in rows] == [["kin40k", "300", "T-SVGP − SVGP"]]
    assert "mine" not in text
    assert readme.headline([]) == ""


def test_the_scales_of_the_first_table_are_the_default_ones():
    made = [
        {**one, "experiment": "mnist", "dataset": "mnist", "num_inducing": number, "config": {"conditional": name}}
        for one in results()
        for name, number in (("beta", 512), ("optimal", 256))
    ]
    (row,) = [line for line in readme.headline(made).splitlines() if line.startswith("| mnist")]
    assert row.split("|")[2].strip() == "256"


def test_step_times_have_the_columns_that_were_measured():
    def line(size, **times):
        names = {"stock": "gpytorch svgp", "ours": "t-svgp"}
        return {
            "experiment": "speed",
            "num_inducing": size,
            "batch_size": 8,
            "threads": 3,
            "milliseconds": {names[name]: value for name, value in times.items()},
        }

    peer = {"experiment": "speed peers", "method": "gpflow", "num_inducing": 4, "batch_size": 8, "milliseconds": 3.0}
    text = readme.steps([line(4, stock=2.0, ours=1.0), line(16, stock=4.0, ours=8.0), peer])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines()[:4]]
    assert rows[0] == ["M, B", "GPyTorch SVGP", "T-SVGP", "GPflow SVGP"]
    assert rows[2:] == [["4, 8", "2.0", "1.0", "3.0"], ["16, 8", "4.0", "8.0", ""]]
    assert text.endswith("share of GPyTorch's time: 1.00 (3 threads).")


def test_blocks_are_made_anew_and_the_rest_is_left():
    text = "a\n<!-- one:begin -->\nold\n<!-- one:end -->\nb\n<!-- none:begin -->\n<!-- none:end -->\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readme, "BLOCKS", {"one": lambda: "new", "none": lambda: ""})
        made = readme.updated(text)
        assert made == text.replace("old", "new")
        assert readme.updated(made) == made


def test_versions_are_shown_with_their_outcome():
    versions = {"torch": "2", "gpytorch": "1", "linear-operator": "0", "numpy": "3"}
    line = {"which": "lowest", "python": "3.10.1", "versions": versions, "counts": {"passed": 7}, "outcome": "passed"}
    cells = [cell.strip() for cell in readme.versions([line]).splitlines()[2].split("|")[1:-1]]
    assert cells == ["3.10.1", "2", "1", "0", "3", "7 passed (the lowest versions allowed)"]
    assert readme.versions([]) == ""


# -- claims ------------------------------------------------------------------------------------------------------------


def verdicts(found, speed=()):
    rows = [row.split("|") for row in claims.table(found, speed).splitlines()[2:] if row.startswith("|")]
    return {row[1].strip(): row[4].strip() for row in rows}


def test_a_claim_without_results_has_no_row():
    assert claims.table([], []) == ""
    found = verdicts(results())
    assert "MNIST: substantial gains in all metrics" not in found
    assert not any(claim.startswith(("Snelson", "oil", "wine")) for claim in found)


def test_a_loss_is_no_agreement():
    claim = "tighter methods match or outperform their base on every data set"
    assert verdicts(results())[claim] == "in part"  # one of three splits loses
    won = [one for one in results() if one["split"] == 0]
    assert verdicts(won)[claim] == "yes"


def test_losses_are_named_with_the_distance_of_the_bounds():
    text = claims.table(results(), [])
    assert "losses in test log-lik.: kin40k M=64 T-SVGP (1 of 3, bounds 0.0200 apart)" in text
    assert "of 1 rows 0 converged, 0 not, 1 not checked" in text


def test_runs_that_only_check_convergence_are_no_claims():
    doubled = [{**one, "config": {"epochs": 4}, "nlpd": 9.0 * one["nlpd"]} for one in results() if one["split"] == 0]
    text = claims.table([*results(), *doubled], [])
    assert "of 1 rows 1 converged, 0 not, 0 not checked" in text
    assert "1 wins, 1 ties, 1 losses" in text
    assert "runs with other budgets, which only check that: test log-lik. 1 wins, 0 ties, 0 losses" in text


@pytest.mark.parametrize(
    ("gains", "agrees"), [((0.3, 0.31, 0.29), "yes"), ((0.1, 0.3, -0.2), "in part"), ((-0.1, -0.2, 0.1), "no")]
)
def test_the_oil_flow_by_the_example_agrees_where_all_seeds_do(gains, agrees):
    made = []
    for seed, gain in enumerate(gains):
        for method, bound in (("v-bgplvm", 5.2 + 0.1 * seed), ("tv-bgplvm", 5.2 + 0.1 * seed + gain)):
            made.append(
                {**result(method, 0, bound, None, None), "experiment": "oil_example", "dataset": "oil", "seed": seed}
            )
    (claim,) = verdicts(made)
    assert claim.startswith("oil flow, M=64, by the protocol of GPyTorch's example")
    assert verdicts(made)[claim] == agrees
    assert ("end up to 0.20 apart" in claims.table(made, [])) == (agrees != "yes")


def test_digits_have_a_row_per_conditional():
    made = []
    for one in results():
        made.append(
            {**one, "experiment": "mnist", "dataset": "mnist", "config": {"epochs": 2, "conditional": "optimal"}}
        )
        if one["method"] == "t-svgp":
            made.append({**made[-1], "config": {"epochs": 2, "conditional": "beta"}})
    assert [claim.partition(":")[0] for claim in verdicts(made)] == [
        "MNIST, the best scales",
        "MNIST, one learned beta per class as in the paper",
    ]
    assert "curvature times residual variance" not in claims.table(made, [])
    told = [{**one, "residual_share": 0.25, "curvature_ratio": 0.0123, "error": 0.1} for one in made]
    assert "leave 25% of the prior variance" in claims.table(told, [])
    assert "curvature times residual variance is 0.012 on average" in claims.table(told, [])


def test_the_last_term_has_a_row_per_start():
    common = {"experiment": "prediction", "dataset": "wine", "seconds": 1.0}
    made = []
    for method, seconds in (("drop", 1.0), ("exact", 9.0)):
        one = {**result(method, 0, 0.0, 0.66, 0.4), **common, "seconds": seconds}
        moved = {**one, "config": {"epochs": 2, "start": "data"}, "start": "exact"}
        learnt = {**one, "bound": -1.4, "flags": ["learnt the mean"]}
        made += [{**learnt, "bound": -1.4189}, moved, {**moved, "split": 1, "start": "median"}]
    assert "1 of 1 runs have the RMSE of the mean on their test rows" in claims.table(
        [{**learnt, "method": "drop"}, learnt], []
    )
    found = claims.table(made, [])
    assert "| wine: predictions" in found
    assert "| wine, from a better start: predictions" in found
    assert found.count("1 of 1 runs learnt the mean alone") == 1
    assert list(verdicts(made).values()) == ["in part", "yes"]
    assert "the better start was another than above in 1 of 2 runs" in found
    unmoved = [{**one, "start": "median"} if "start" in one else one for one in made]
    assert "from a better start" not in claims.table(unmoved, [])


def test_printed_hyperparameters_are_compared_to_their_last_digit():
    def learnt(method, noise, variance):
        made = result(method, 0, 0.1 * method.startswith("t"), None, None, noise=noise, outputscale=variance)
        return {**made, "experiment": "snelson", "dataset": "snelson"}

    claim = "Snelson, 5 inducing points: less noise, a larger kernel variance (noise, variance)"
    base = learnt("sgpr", 0.1263, 0.0868)
    assert verdicts([base, learnt("t-sgpr", 0.1152, 0.1071)])[claim] == "yes"
    assert verdicts([base, learnt("t-sgpr", 0.1252, 0.1071)])[claim] == "no"


def test_collapsed_models_are_found_by_size_method_and_blocks():
    def run(method, size, blocks, rmse, log_likelihood):
        made = result(method, 0, 0.0, -log_likelihood, rmse, num_inducing=size, config={"num_blocks": blocks})
        return {**made, "experiment": "blocks"}

    runs = [run("exact", None, None, 0.12, 0.5), run("block", 256, 50, 0.22, -0.04), run("block", 256, 7, 0.0, 0.0)]
    found = {claim: verdict for claim, verdict in verdicts(runs).items() if claim.startswith("kin40k, 5,000")}
    assert list(found.values()) == ["in part", "yes"]
    assert [claim.split(" (")[0] for claim in found] == [
        "kin40k, 5,000 rows, exact GP",
        "kin40k, 5,000 rows, 50 blocks, M=256",
    ]


def test_a_collapsed_model_whose_training_was_stopped_says_what_it_still_gained():
    def line(method, bound, half, **more):
        made = result(method, 0, bound, 0.14, 0.26, num_inducing=256, config={"num_blocks": None, "max_iter": 1000})
        return {**made, "experiment": "blocks", "converged": False, "bound_at_half": half, **more}

    stopped = "L-BFGS was stopped after 1,000 iterations"
    assert stopped not in claims.table([line("sgpr", -0.4, -0.5, converged=True)], [])
    assert f"{stopped} " in claims.table([line("sgpr", -0.4, None)], [])
    base, rise = line("sgpr", -0.5, -0.51), "; their second half raised the bound by"
    assert f"{stopped}{rise} 0.0100 nats per point " in claims.table([base], [])
    near, far = line("t-sgpr", -0.4, -0.412), line("t-sgpr", -0.4, -0.43)
    assert f"{rise} 0.0120 nats per point, its lead over SGPR by 2%: converged " in claims.table([base, near], [])
    assert f"{rise} 0.0300 nats per point, its lead over SGPR by 25%: not converged " in claims.table([base, far], [])


@pytest.mark.parametrize(("gains", "agrees"), [((0.1, 0.2), "yes"), ((0.1, -0.001), "in part"), ((-0.1, -0.2), "no")])
def test_a_gain_for_every_number_of_points_is_one_in_every_row(gains, agrees):
    made = [
        result(method, 0, -1 + gain * (method == "t-svgp"), 0.5, 0.3, num_inducing=size)
        for size, gain in zip((8, 16), gains, strict=True)
        for method in ("svgp", "t-svgp")
    ]
    claim = "the gain is there for every number of inducing points"
    assert verdicts(made)[claim] == agrees
    assert ("not ahead: kin40k M=16 T-SVGP (-0.0010)" in claims.table(made, [])) == (agrees == "in part")


@pytest.mark.parametrize(("densities", "agrees"), [((0.1, 0.2, 0.3), "yes"), ((0.1, 0.2, 0.15), "in part")])
def test_larger_blocks_are_better_where_bound_and_density_rise(densities, agrees):
    kinds = (("t-sgpr", None), ("block", 50), ("block", 10))
    made = [
        {
            **result(method, 0, bound, -density, 0.2, num_inducing=256, config={"num_blocks": blocks}),
            "experiment": "blocks",
            "noise": noise,
        }
        for (method, blocks), bound, density, noise in zip(
            kinds, (-0.4, -0.3, -0.2), densities, (0.04, 0.0225, 0.01), strict=True
        )
    ]
    reason = "over RMSE it is T-SGPR 1.00, 50 blocks 0.75, 10 blocks 0.50"
    assert (reason in claims.table(made, [])) == (agrees != "yes")
    assert verdicts(made)["kin40k, 5,000 rows, M=256: larger blocks are better (bound, log-likelihood)"] == agrees


@pytest.mark.parametrize(("noise", "is_told"), [(0.0036, True), (0.0, False), (None, False)])
def test_a_collapsed_model_that_differs_tells_its_noise_beside_the_papers(noise, is_told):
    made = {**result("exact", 0, 0.0, -0.5, 0.12, num_inducing=None, noise=noise), "experiment": "blocks"}
    assert ("the noise is 0.06 here, 0.00 there" in claims.table([made], [])) == is_told
    agreeing = {**made, "nlpd": -0.8}
    assert "the noise is" not in claims.table([agreeing], [])


def test_a_trace_that_falls_behind_says_when_and_by_how_much():
    def pair(*leads):
        trace = lambda values: [{"epoch": 5 * (i + 1), "bound": value} for i, value in enumerate(values)]
        return [
            result("svgp", 0, -1.0, 0.5, 0.3, trace=trace([0.0] * len(leads))),
            result("t-svgp", 0, -0.9, 0.5, 0.3, trace=trace(leads)),
        ]

    claim = "kin40k: the gain is there throughout training"
    assert verdicts(pair(0.1, 0.2))[claim] == "yes"
    assert "behind" not in claims.table(pair(0.1, 0.2), [])
    early = pair(-0.03, -0.01, 0.2, 0.3)
    told = "in traces of 4 points behind at 2 of 4, the last of them 50% into training, by up to 0.0300 nats per point"
    assert told in claims.table(early, [])
    assert verdicts(early)[claim] == "no"
    assert verdicts(pair(-0.03, 0.1, 0.2, 0.3))[claim] == "in part"


def test_run_times_are_compared_with_our_own_base():
    line = {"experiment": "speed", "milliseconds": {"svgp": 2.0, "t-svgp": 2.1, "gpytorch svgp": 9.0}}
    assert verdicts([], [line]) == {"run times are almost identical": "yes"}
    line["milliseconds"]["t-svgp"] = 3.0
    assert verdicts([], [line]) == {"run times are almost identical": "no"}
