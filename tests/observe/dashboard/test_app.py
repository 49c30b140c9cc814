"""What the server answers, to whom, and what it leaves alone."""

import contextlib
import http.client
import json
import logging
import os
import time
import urllib.parse
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import ConfigError
from headrace.observe.dashboard.access import check_listening
from headrace.observe.dashboard.alert_history import alert_rules, past_alerts
from headrace.observe.dashboard.curves import MetricColumns
from headrace.observe.sinks.alerts import AlertSink

Sums = Callable[..., Path]
Dashboard = Callable[..., AbstractContextManager[str]]
KEY = "a key that nobody guesses"
RUN = "sums_2026-03-01T12-00-00Z"


def get(
    url: str, path: str, *, method: str = "GET", body: str | None = None, **headers: str
) -> tuple[int, dict[str, str], Any]:
    """Ask with exactly these headers; return status, headers and the JSON or text."""
    host, port = url.removeprefix("http://").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    with contextlib.closing(connection):
        connection.request(
            method, path, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        content = answer.read().decode()
        found = {name.lower(): value for name, value in answer.getheaders()}
    with contextlib.suppress(ValueError):
        return answer.status, found, json.loads(content)
    return answer.status, found, content


def wait_for_episodes(url: str, count: int) -> dict[str, Any]:
    for _ in range(200):
        answer = get(url, f"/api/run/{RUN}/episodes")[2]
        if answer["summary"]["count"] == count and answer["index"]["share"] == 1.0:
            return answer
        time.sleep(0.05)
    raise AssertionError("the episodes were not indexed")


def test_a_run_is_described_with_its_advice_alerts_and_warnings(sums: Sums, dashboard: Dashboard) -> None:
    sums()
    with dashboard() as url:
        listed = get(url, "/api/runs")[2]
        assert [(run["id"], run["step"], run["steps"]) for run in listed["runs"]] == [(RUN, 5, 40)]
        run = get(url, f"/api/run/{RUN}")[2]
        assert run["advice"][0]["text"].startswith("The trainer waits 60 % of the time for rewards: raise")
        assert [alert["text"] for alert in run["alerts"]] == [
            "rl, step 3: train/grad_norm is 2; this alert is for train/grad_norm above 1"
        ]
        assert [warning["text"] for warning in run["warnings"]] == ["3 conversations are cut"]
        lanes = get(url, f"/api/run/{RUN}/lanes?window=60")[2]["view"]
        assert lanes["sentence"] == "In the last minute the trainer waited 80 % of the time: 80 % for rewards."
        curves = get(url, f"/api/run/{RUN}/curves")[2]
        reward = next(chart for chart in curves["charts"] if chart["title"] == "Reward")
        assert reward["series"][0]["mean"] == [0.1, 0.2, 0.3, 0.4, 0.5]
        assert get(url, f"/api/run/{RUN}/curves?version={curves['version']}")[2]["same"] is True
        assert get(url, f"/api/run/{RUN}/metric?name=nothing")[0] == 400
        assert get(url, "/api/run/..%2f..%2fetc")[0] == 404


def test_curves_grow_with_the_file_and_begin_again_after_a_resume_cut_it(sums: Sums, dashboard: Dashboard) -> None:
    run = sums()

    def steps() -> list[int]:
        charts = get(url, f"/api/run/{RUN}/curves")[2]["charts"]
        found: list[int] = next(chart for chart in charts if chart["title"] == "Reward")["series"][0]["steps"]
        return found

    with dashboard() as url:
        assert steps() == [1, 2, 3, 4, 5]
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"stage":"rl","step":6,"reward/mean":0.6}\n{"stage":"rl","step":7,"rew')
        assert steps() == [1, 2, 3, 4, 5, 6]
        assert get(url, f"/api/run/{RUN}")[2]["reading"] == 1.0  # of a killed run the line never ends
        whole = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (run / "metrics.jsonl").write_text("".join(whole[:2]))
        assert steps() == [1, 2]
        for name in ("metrics.jsonl", "activity.jsonl", "warnings.json"):
            (run / name).unlink()
        assert get(url, f"/api/run/{RUN}")[0] == 200
        (run / "config.toml").unlink()
        (run / "checkpoints").rmdir()
        time.sleep(2.1)  # folders are looked at every two seconds
        assert get(url, f"/api/run/{RUN}")[0] == 404
        assert get(url, "/api/runs")[2]["runs"] == []


def test_an_episode_shows_what_was_asked_and_expected_and_tool_calls_as_people_read_them(
    sums: Sums, dashboard: Dashboard
) -> None:
    sums()
    with dashboard() as url:
        wait_for_episodes(url, 40)
        row = get(url, f"/api/run/{RUN}/episodes?words=ada3&sort=longest")[2]["rows"][0]
        shown = get(url, f"/api/run/{RUN}/episode?id={row['id']}")[2]
        assert (shown["question"], shown["expected"]) == ("What is 19 plus 3, asked by Ada3?", "22")
        calls = [turn["calls"] for turn in shown["turns"] if turn["calls"]]
        assert calls == [[['calculator(expression="19+3")', "22"]]]
        assert [turn["role"] for turn in shown["turns"]] == ["user", "assistant", "assistant"]
        query = urllib.parse.urlencode({"file": shown["file"], "group": shown["group"]})
        status, headers, page = get(url, f"/view/{RUN}?{query}")
        assert status == 200
        assert "script-src 'sha256-" in headers["content-security-policy"]
        assert page.count('class="card episode"') == 4
        assert get(url, f"/api/run/{RUN}/episode?id=99999")[0] == 400
        assert get(url, f"/api/run/{RUN}/episodes?reward_from=x")[0] == 400
        assert get(url, f"/api/run/{RUN}/episodes?sort=x")[0] == 400


def test_held_out_losses_and_rewards_are_results_in_the_words_of_the_report(sums: Sums, dashboard: Dashboard) -> None:
    run = sums()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"stage":"sft","step":0,"eval/loss":3.5}\n{"stage":"sft","step":9,"eval/loss":1.25}\n')
        file.write('{"stage":"rl","step":6,"eval/reward":0.5}\n')
    with dashboard() as url:
        assert get(url, f"/api/run/{RUN}")[2]["held_out"] == [
            "Mean reward on held-out tasks, reinforcement learning: 0.5.",
            "Held-out loss of supervised fine-tuning: 1.25, from 3.5 when it was first measured.",
        ]


def test_a_held_out_result_of_a_stage_that_still_trains_is_not_its_last(sums: Sums, dashboard: Dashboard) -> None:
    run = sums()
    with dashboard() as url:
        for step, label in ((6, "RL so far"), (40, "After RL")):
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"stage": "rl", "step": step, "eval/pass@1": 0.5}) + "\n")
            assert [bar["label"] for bar in get(url, f"/api/run/{RUN}")[2]["bars"]] == [label]


def test_two_runs_are_compared(sums: Sums, dashboard: Dashboard) -> None:
    sums()
    other = sums("other_2026-03-02T12-00-00Z")
    (other / "config.toml").write_text(
        '[run]\nname = "other"\n[model]\npath = "tiny"\n[rl]\nsteps = 80\ngroup_size = 4\n'
    )
    with dashboard() as url:
        answer = get(url, f"/api/compare?run={RUN}&run={other.name}")[2]
        assert {"key": "rl.steps", "arms": ["40", "80"]} in answer["differences"]
        figures = {row["name"]: row["values"] for row in answer["figures"]}
        assert figures["reward/mean, last 10 steps"] == pytest.approx([0.3, 0.3])


def test_nothing_in_the_run_folder_changes_and_the_index_can_be_thrown_away(
    sums: Sums, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = sums()

    def facts() -> dict[str, tuple[int, int]]:
        return {str(path): (path.stat().st_mtime_ns, path.stat().st_size) for path in [run, *run.rglob("*")]}

    before = facts()
    with dashboard() as url:
        wait_for_episodes(url, 40)
        for path in ("", "/curves", "/lanes", "/notes", "/episodes", "/episode?id=1"):
            assert get(url, f"/api/run/{RUN}{path}")[0] == 200
    assert facts() == before
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    with dashboard() as url:
        wait_for_episodes(url, 40)


def test_only_reading_is_answered_and_only_under_a_name_of_this_machine(sums: Sums, dashboard: Dashboard) -> None:
    sums()
    with dashboard() as url:
        port = url.rsplit(":", 1)[1]
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "[evil]", "192.168.0.7"):
            assert get(url, "/api/runs", host=host)[0] == 421, host
        for host in ("localhost", f"127.0.0.1:{port}", "[::1]:80"):
            assert get(url, "/api/runs", host=host)[0] == 200
        for method in ("POST", "PUT", "DELETE"):
            assert get(url, "/api/runs", method=method)[0] == 405
        assert get(url, "/api/runs", sec_fetch_site="cross-site", sec_fetch_mode="no-cors")[0] == 403
        for path in ("/", "/api/runs", "/static/pages.js", "/nothing", "/static/..%2fapp.py"):
            policy = get(url, path)[1]["content-security-policy"]
            assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
            assert "unsafe" not in policy
        assert get(url, "/static/app.py")[0] == 404


def test_beyond_this_machine_a_key_is_needed_and_a_short_one_is_refused() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ConfigError, match="without a key would show the runs to everybody"):
            check_listening(host, None)
        check_listening(host, KEY)
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.7"):
        check_listening(host, None)
    with pytest.raises(ConfigError, match="the key has 5 characters"):
        check_listening("127.0.0.1", "short")


def test_with_a_key_nothing_of_a_run_is_answered_without_it(sums: Sums, dashboard: Dashboard) -> None:
    sums()
    with dashboard(host="0.0.0.0", key=KEY) as served:
        url = served.replace("0.0.0.0", "127.0.0.1")
        assert get(url, "/")[0] == 200  # the page itself, which asks for the key
        for path in ("/api/runs", f"/api/run/{RUN}", f"/view/{RUN}?file=a&group=b", "/api/compare"):
            assert get(url, path)[0] == 401
            assert get(url, path, authorization=f"Bearer {KEY}x")[0] == 401
            assert get(url, path, cookie="headrace_dashboard=")[0] == 401
        assert get(url, "/api/runs", authorization=f"Bearer {KEY}")[0] == 200
        assert get(url, "/login", method="POST", body="wrong")[0] == 401
        assert get(url, "/login", method="POST", body="x" * 10_000)[0] == 413
        status, headers, _ = get(url, "/login", method="POST", body=KEY)
        assert status == 200
        cookie = headers["set-cookie"]
        assert KEY not in cookie
        assert "httponly" in cookie.lower()
        assert "samesite=strict" in cookie.lower()
        assert get(url, "/api/runs", cookie=cookie.split(";")[0])[0] == 200


def test_alerts_found_again_are_those_that_the_sink_gave(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    config = {
        "metrics": {"alerts": [{"metric": "a", "above": 1.0, "for_steps": 2, "cooldown_steps": 3}, {"metric": "b"}, 7]}
    }
    rules, columns = alert_rules(config), MetricColumns()
    assert len(rules) == 1
    sink = AlertSink(rules, {}, stage="rl", about={}, seen_metrics=set())
    for step, value in enumerate([0.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.0, float("nan"), 9.0, 9.0], start=1):
        sink.log(step, {"a": value})
        shown = "NaN" if value != value else value
        columns.add([json.dumps({"stage": "rl", "step": step, "a": shown}).encode()])
    told = [message.removeprefix("alert: ") for message in caplog.messages]
    assert len(told) >= 2
    assert [alert.text for alert in reversed(past_alerts(columns, rules))] == told


def test_a_run_that_is_written_elsewhere_is_followed_through_its_folder(sums: Sums, dashboard: Dashboard) -> None:
    """No process here holds the folder; another machine's lock tells that it runs, its files that it is silent."""
    run = sums()
    (run / ".lock").mkdir()
    holder = {"host": "far-away", "system": "x", "pid": 7, "started": "1", "since": "now", "token": "t"}
    (run / ".lock" / "000001").write_text(f"{1:<19}\n{json.dumps(holder)}\n")
    hour_ago = time.time() - 3600
    for name in ("activity.jsonl", "metrics.jsonl"):
        os.utime(run / name, (hour_ago, hour_ago))
    with dashboard() as url:
        shown = get(url, f"/api/run/{RUN}")[2]
        assert shown["state"] == "running"
        assert "far-away" in shown["by"]
        assert shown["silent_s"] > 3500
        with (run / "activity.jsonl").open("a") as file:
            file.write(json.dumps({"at": 5.0, "s": 1.0, "step": 6, "busy": {"training": 1.0}}) + "\n")
        assert get(url, f"/api/run/{RUN}")[2]["silent_s"] < 60


def test_addresses_of_webhooks_and_files_behind_links_are_not_shown(
    sums: Sums, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = sums()
    with (run / "config.toml").open("a") as file:
        file.write('webhook = "https://chat.example/secret"\n[[metrics.alerts]]\nmetric = "a"\nwebhook = "env:HOOK"\n')
    (tmp_path / "private").write_text("12:00 WARNING private\n")
    (run / "log.txt").symlink_to(tmp_path / "private")
    with dashboard() as url:
        notes = get(url, f"/api/run/{RUN}/notes")[2]
        assert "secret" not in notes["config"]
        assert 'webhook = "env:HOOK"' in notes["config"]
        assert notes["log"] == []
        (run / "log.txt").unlink()
        (run / "log.txt").write_text("12:00:00 WARNING headrace.x: slow disk\n12:00:01 INFO headrace.x: step\n")
        assert get(url, f"/api/run/{RUN}/notes")[2]["log"] == ["12:00:00 WARNING headrace.x: slow disk"]
