"""The dashboard in a real browser: what a reader sees, and what no rollout can do."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from support.chromium import Tab, chromium, decode_png, needs_chromium
from support.made_up_run import make_run

pytestmark = needs_chromium

Sums = Callable[..., Path]
Dashboard = Callable[..., AbstractContextManager[str]]
RUN = "sums_2026-03-01T12-00-00Z"
KEY = "a key that nobody guesses"


def wait_until(tab: Tab, expression: str, *, limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not tab.ask(f"!!({expression})"):
        assert time.monotonic() < deadline_s, expression
        time.sleep(0.05)


def set_field(tab: Tab, selector: str, value: str, event: str) -> None:
    chosen = f"document.querySelector({json.dumps(selector)})"
    tab.ask(f"{chosen}.value = {json.dumps(value)}; {chosen}.dispatchEvent(new Event('{event}', {{bubbles: true}}))")


def text(tab: Tab, selector: str) -> str:
    return str(tab.ask(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))


def test_a_reader_opens_a_run_sees_it_grow_and_reads_an_episode(
    sums: Sums, dashboard: Dashboard, tmp_path: Path
) -> None:
    run = sums()
    sums("other_2026-03-02T12-00-00Z")
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        tab.open(url)
        wait_until(tab, "document.querySelectorAll('.run').length == 2")
        assert "RL step 5 of 40" in text(tab, "main")
        tab.ask(f"location.hash = '#/run/{RUN}'")
        wait_until(tab, "document.querySelectorAll('svg.chart').length > 3")
        assert "The trainer waits 60 % of the time for rewards: raise rl.reward_runner.workers" in text(tab, ".advice")
        assert "Alert: rl, step 3: train/grad_norm is 2" in text(tab, ".advice")
        wait_until(tab, "document.querySelectorAll('.lane').length == 5")  # four lanes and the axis
        assert "the trainer waited 80 % of the time: 80 % for rewards" in text(tab, ".lanes")
        assert tab.ask("document.querySelectorAll('figure.card p.note').length") >= 3, "a sentence under every chart"

        before = tab.ask("document.querySelector('.body').dataset.drawn")
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"stage":"rl","step":6,"reward/mean":0.95,"time/step_s":2.0}\n')
        wait_until(tab, f"document.querySelector('.body').dataset.drawn != {json.dumps(before)}")
        wait_until(tab, "document.querySelector('.steps-now').innerText.startsWith('6')")
        assert "0.1 → 0.95" in text(tab, "section.curves")

        tab.ask(f"location.hash = '#/run/{RUN}/episodes'")
        wait_until(tab, "document.querySelector('.summary')?.innerText.startsWith('40 episodes')")
        set_field(tab, "input[name=words]", "ada3", "input")
        wait_until(tab, "document.querySelector('.summary').innerText.startsWith('8 episodes')")
        set_field(tab, "select[name=sort]", "longest", "change")
        wait_until(tab, "document.querySelector('.row-foot').innerText.includes('74 tokens')")
        tab.ask("document.activeElement.blur()")
        tab.press("j")
        wait_until(tab, "document.querySelector('.reader .call')")
        assert text(tab, ".reader .call") == 'calculator(expression="19+3") -> 22'
        assert "What is 19 plus 3, asked by Ada3?" in text(tab, ".question")
        assert text(tab, ".expected") == "22"
        link = tab.ask("document.querySelector('.whole').href")
        tab.open(link)
        assert "expected 22" in text(tab, ".question").replace("\n", " ")

        tab.open(f"{url}/#/compare?run={RUN}&run=other_2026-03-02T12-00-00Z")
        wait_until(tab, "document.querySelectorAll('svg.chart').length > 2")
        assert tab.ask("document.querySelectorAll('figure .legend i.a1').length") > 2


def test_no_text_of_a_run_acts(
    sums: Sums, dashboard: Dashboard, tmp_path: Path, outside: tuple[str, list[str]]
) -> None:
    reach, asked = outside
    script = f"<script>document.title='owned';fetch('{reach}/fetched')</script>"
    attack = f"{script}<img src='{reach}/seen' onerror='alert(1)'>\u202e"
    sums(note=attack)
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        for where in ("", "/episodes", "/notes"):
            tab.open(f"{url}/#/run/{RUN}{where}")
            time.sleep(0.3)
            if where == "/episodes":
                wait_until(tab, "document.querySelectorAll('.episode-row').length == 40")
                tab.press("j")
                wait_until(tab, "document.querySelector('.reader .turns')")
                tab.ask("location.hash")
                assert "<script>document.title='owned'" in text(tab, ".reader")
                assert "\\u202e" in text(tab, ".reader")
                link = tab.ask("document.querySelector('.whole').href")
            assert tab.ask("document.querySelectorAll('main img, main script').length") == 0
            assert tab.ask("document.title") != "owned"
        tab.open(link)
        assert tab.ask("document.title") != "owned"
    assert asked == []


@pytest.mark.slow
def test_pages_of_other_sites_and_scripts_put_into_the_page_get_nothing(
    sums: Sums, dashboard: Dashboard, tmp_path: Path, outside: tuple[str, list[str]]
) -> None:
    """The policy holds even if our escaping did not."""
    reach, asked = outside
    sums()
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        tab.open(url)
        tab.ask(
            "document.body.insertAdjacentHTML('beforeend', `<img src='"
            + reach
            + "/seen' onerror='document.title=1'>`);"
            "const own = document.createElement('script'); own.textContent = 'document.title = \"owned\"';"
            "document.body.append(own);"
            f"fetch('{reach}/fetched').catch(() => 0); 0"
        )
        time.sleep(0.5)
        assert tab.ask("document.title") == "Runs · Headrace"
    assert asked == []


@pytest.mark.slow
def test_the_key_is_asked_for_and_opens_the_page(sums: Sums, dashboard: Dashboard, tmp_path: Path) -> None:
    sums()
    with dashboard(key=KEY) as url, chromium(tmp_path / "profile") as tab:
        tab.open(url)
        assert "This dashboard has a key" in text(tab, "main")
        for key, expected in (("wrong", "'This is not the key.'"), (KEY, "'RL step 5 of 40'")):
            tab.ask(
                f"document.querySelector('input').value = {json.dumps(key)};"
                "document.querySelector('form').requestSubmit()"
            )
            wait_until(tab, f"document.querySelector('main').innerText.includes({expected})")


@pytest.mark.slow
def test_axes_are_in_the_order_of_the_run_and_a_folder_that_cannot_be_read_says_so(
    sums: Sums, dashboard: Dashboard, tmp_path: Path
) -> None:
    broken, run = sums("broken_2026-03-02T12-00-00Z"), make_run(tmp_path / "runs")
    (broken / "config.toml").write_text("[run\n")
    none = tmp_path / "runs" / "none_2026-03-03T12-00-00Z"
    (none / "checkpoints").mkdir(parents=True)
    (none / "config.toml").write_text("[sft]\nsteps = 4\n")
    with (broken / "rollouts" / "step_000001.jsonl").open("a") as file:
        file.write("no episode\n")
    with (broken / "metrics.jsonl").open("a") as file:  # the ticks of this axis differ in the fifth digit
        file.write(
            '{"stage":"rl","step":6,"made_up/ratio":1.0001}\n{"stage":"rl","step":7,"made_up/ratio":1.0005}\n{"st'
        )
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        tab.open(f"{url}/#/run/{run.name}")
        wait_until(tab, "document.querySelectorAll('svg.chart').length > 10")
        stages = tab.ask(
            "[...document.querySelectorAll('svg.chart')].map((chart) => [...chart.querySelectorAll('text.stage')]"
            ".map((text) => text.textContent).join(' '))"
        )
        assert set(stages) == {"", "SFT RL"}
        assert stages.count("SFT RL") > 3
        assert "7.5e-5 → 0.0003" in text(tab, "section.curves")  # of the learning rate, over both stages

        tab.open(f"{url}/#/run/{broken.name}")
        assert "config.toml cannot be read: TOMLDecodeError" in text(tab, ".run-head")
        assert "Reading the metrics" not in text(tab, ".run-head")
        wait_until(tab, "document.querySelector('.others option')")
        set_field(tab, ".others input", "made_up/ratio", "change")
        wait_until(tab, "document.querySelector('.others svg.chart')")
        ticks = tab.ask(
            "[...document.querySelectorAll('.others svg.chart text[text-anchor=end]')].map((text) => text.textContent)"
        )
        assert len(ticks) > 2
        assert len(set(ticks)) == len(ticks)
        tab.ask(f"location.hash = '#/run/{none.name}/episodes'")
        wait_until(tab, "document.querySelector('main').innerText.includes('The run has saved no episodes')")
        tab.ask(f"location.hash = '#/run/{broken.name}/episodes'")
        wait_until(tab, "document.querySelector('.summary')?.innerText.startsWith('40 episodes')")
        wait_until(tab, "document.querySelector('.summary').innerText.includes('1 line of the rollout files')")


@pytest.mark.slow
def test_an_empty_folder_says_how_a_run_begins(dashboard: Dashboard, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        tab.open(url)
        wait_until(tab, "document.querySelector('main').innerText.includes('headrace train run.toml')")
        assert tab.ask("document.querySelector('button.primary').hidden")


@pytest.mark.slow
def test_it_fits_a_phone_and_has_a_dark_side(sums: Sums, dashboard: Dashboard, tmp_path: Path) -> None:
    sums()
    with dashboard() as url, chromium(tmp_path / "profile") as tab:
        for where in ("#/", f"#/run/{RUN}", f"#/run/{RUN}/episodes", f"#/run/{RUN}/notes"):
            for width in (390, 1400):
                tab.open(f"{url}/{where}", width=width)
                time.sleep(0.2)
                assert tab.ask("document.documentElement.scrollWidth") <= width, (where, width)
        corners = []
        for dark in (False, True):
            tab.open(f"{url}/#/run/{RUN}", dark=dark, width=300, height=200)
            _, pixels = decode_png(tab.picture(tmp_path / "page.png").read_bytes())
            corners.append(pixels[0])
        assert corners == [(0xF3, 0xF6, 0xF7), (0x0C, 0x13, 0x17)]
