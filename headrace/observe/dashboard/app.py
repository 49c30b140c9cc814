"""The application: the page, its files, and what they ask for. Every answer is computed from run folders, which stay
as they are. Texts from run folders are rendered visible here, and the page puts them in as text, never as markup."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from headrace.errors import HeadraceError, RunFolderError
from headrace.observe.comparison.compared import config_differences
from headrace.observe.comparison.held_out import FinalAnswer
from headrace.observe.dashboard.access import COOKIE, Gate
from headrace.observe.dashboard.curves import chart_of, finite_json, other_names
from headrace.observe.dashboard.episode_index import SORTS, EpisodeFilter
from headrace.observe.dashboard.episode_json import episode_json
from headrace.observe.dashboard.followed_run import FollowedRun
from headrace.observe.dashboard.followed_runs import FollowedRuns
from headrace.observe.dashboard.lanes import lane_view
from headrace.observe.dashboard.paired import HeldOutTests, no_answer
from headrace.observe.report.charts import Curve
from headrace.observe.rollouts.records import parse_line
from headrace.observe.run_folder import start_of
from headrace.observe.viewer.catalog import Catalog, summarize_line
from headrace.observe.viewer.page import MAX_EPISODES, page
from headrace.observe.viewer.tokens import find_tokenizer, token_pieces
from headrace.printable import visible

PAGE_FILES = {
    "dashboard.css": "text/css",
    "dashboard.js": "text/javascript",
    "charts.js": "text/javascript",
    "pages.js": "text/javascript",
}
MAX_ROWS = 100
MAX_BODY = 4096
MAX_COMPARED = 8
Answer = Callable[[FollowedRun, Mapping[str, str]], Any]


class _Finite(JSONResponse):
    """JSON in which every foreign text is visible."""

    def render(self, content: Any) -> bytes:
        return finite_json(_shown(content)).encode("utf-8", "replace")


def make_app(runs: FollowedRuns, *, host: str, key: str | None, final_answer: FinalAnswer = no_answer) -> Gate:
    """Build the application behind its gate. Without `final_answer` there are no votes (maj@k)."""
    gate: Gate
    tests = HeldOutTests(final_answer)

    async def login(request: Request) -> Response:
        if request.method != "POST":
            return _Finite({"needs_key": gate.needs_key})
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY:
                return _Finite({"error": "this is no key"}, status_code=413)
        cookie = gate.cookie_for(body.decode("utf-8", "replace"))
        if cookie is None:
            return _Finite({"error": "this is not the key"}, status_code=401)
        answer = _Finite({"ok": True})
        answer.set_cookie(COOKIE, cookie, httponly=True, samesite="strict", path="/")
        return answer

    def of_run(answer: Answer) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            run = runs.get(request.path_params["run"])
            if run is None:
                return _Finite({"error": "there is no such run (any more)"}, status_code=404)
            try:
                content = answer(run, request.query_params)
            except (ValueError, HeadraceError, OSError) as exc:
                return _Finite({"error": f"{exc}"[:500]}, status_code=400)
            return content if isinstance(content, Response) else _Finite(content)

        return respond

    def listed(request: Request) -> Response:
        found, left = runs.listed()
        rows = [{"id": name, **asdict(run)} for name, run in found.items()]
        return _Finite({"runs": rows, "left": left})

    def compared(request: Request) -> Response:
        names = request.query_params.getlist("run")[:MAX_COMPARED]
        chosen = [(name, run) for name in names if (run := runs.get(name)) is not None]
        return _Finite(_comparison(chosen) | {"held_out": tests.compare([(n, run.folder) for n, run in chosen])})

    routes = [
        Route("/", _index, methods=["GET"]),
        Route("/login", login, methods=["GET", "POST"]),
        Route("/static/{name}", _static, methods=["GET"]),
        Route("/api/runs", listed, methods=["GET"]),
        Route("/api/compare", compared, methods=["GET"]),
        Route("/api/run/{run}", of_run(lambda run, asked: run.overview()), methods=["GET"]),
        Route("/api/run/{run}/curves", of_run(_curves), methods=["GET"]),
        Route("/api/run/{run}/metric", of_run(_metric), methods=["GET"]),
        Route("/api/run/{run}/lanes", of_run(_lanes), methods=["GET"]),
        Route("/api/run/{run}/notes", of_run(_notes), methods=["GET"]),
        Route("/api/run/{run}/episodes", of_run(_episodes), methods=["GET"]),
        Route("/api/run/{run}/episode", of_run(_episode), methods=["GET"]),
        Route("/view/{run}", of_run(_view), methods=["GET"]),
    ]
    gate = Gate(Starlette(routes=routes), host=host, key=key)
    return gate


def _index(request: Request) -> Response:
    return HTMLResponse((files("headrace.observe.dashboard") / "dashboard.html").read_text(encoding="utf-8"))


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in PAGE_FILES:
        return _Finite({"error": "there is no such file"}, status_code=404)
    content = (files("headrace.observe.dashboard") / name).read_text(encoding="utf-8")
    return Response(content, media_type=PAGE_FILES[name])


def _shown(value: Any) -> Any:
    """Render all texts of an answer visible; numbers that JSON lacks become null."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, float):
        return value if abs(value) < float("inf") else None
    if isinstance(value, Mapping):
        return {visible(str(name)): _shown(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return value


# --- a run -----------------------------------------------------------------------------------------------------------


def _curves(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    if asked.get("version") == run.version:
        return {"version": run.version, "same": True}
    version = run.version
    return {
        "version": version,
        "charts": run.charts(),
        "others": other_names(run.columns)[:1000],
        "reading": run.reading,
        "keeps_every": run.columns.keeps_every,
    }


def _metric(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    name = asked.get("name", "")
    chart = chart_of(Curve(title=name, names=((name, name),), explanation=""), run.columns)
    if chart is None:
        raise ValueError(f"the run has no metric {name[:100]!r}")
    return chart


def _lanes(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    window_s = min(3600.0, max(30.0, float(asked.get("window", "120"))))
    return {"view": lane_view(run.activity(), window_s=window_s)}


def _notes(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    return {"log": run.log_warnings(), "config": run.shown_config()[:200_000]}


def _episodes(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    began_s = time.perf_counter()
    numbers: dict[str, Any] = {
        name: _number(asked, name)
        for name in ("step_from", "step_to", "reward_from", "reward_to", "tokens_from", "tokens_to")
    }
    texts: dict[str, Any] = {
        name: asked[name][:500] for name in ("outcome", "task", "file", "group", "words") if asked.get(name)
    }
    wanted = EpisodeFilter(**numbers, **texts)
    sort = asked.get("sort", "newest")
    if sort not in SORTS:
        raise ValueError(f"episodes are sorted by {', '.join(SORTS)}")
    skip, limit = int(_number(asked, "skip") or 0), min(MAX_ROWS, max(1, int(_number(asked, "limit") or 40)))
    return {
        "rows": run.index.find(wanted, sort=sort, limit=limit, skip=max(0, skip)),
        "summary": run.index.summarize(wanted),
        "choices": run.index.choices(),
        "index": asdict(run.index.progress),
        "seconds": round(time.perf_counter() - began_s, 3),
    }


def _number(asked: Mapping[str, str], name: str) -> float | None:
    value = asked.get(name, "").strip()
    return float(value) if value else None


def _episode(run: FollowedRun, asked: Mapping[str, str]) -> Any:
    found = run.index.line(int(asked.get("id", "-1")))
    if found is None:
        raise RunFolderError("this episode is not there any more: the run was resumed, or its files were removed")
    raw, file = found
    return {"file": file, **episode_json(parse_line(raw))}


def _view(run: FollowedRun, asked: Mapping[str, str]) -> Response:
    """Show a group as `headrace view --html` does; the page's own policy allows its script by its hash."""
    file, group = asked.get("file", ""), asked.get("group", "")
    lines = [parse_line(raw) for raw in run.index.group_lines(file, group, limit=MAX_EPISODES)]
    if not lines:
        raise RunFolderError("this group is not there any more: the run was resumed, or its files were removed")
    path = run.folder.rollouts / Path(file).name
    catalog = Catalog(
        path=path,
        summaries=tuple(summarize_line(place, line) for place, line in enumerate(lines)),
        method=lines[0].credit,
        run=run.path.name,
        training_step=lines[0].training_step,
    )
    tokenizer = find_tokenizer(path, None)
    html = page(catalog, lines, token_pieces(tokenizer), ids_only=tokenizer is None)
    policy = html.split('http-equiv="Content-Security-Policy" content="', 1)[1].split('"', 1)[0]
    return HTMLResponse(html, headers={"content-security-policy": f"{policy}; frame-ancestors 'none'"})


# --- several runs ----------------------------------------------------------------------------------------------------


def _comparison(chosen: list[tuple[str, FollowedRun]]) -> dict[str, Any]:
    figures = [run.last_figures() for _, run in chosen]
    names = list(dict.fromkeys(name for of_run in figures for name in of_run))
    differences = config_differences([[run.config()] for _, run in chosen])
    return {
        "runs": [
            {"id": name, "state": run.described().state, "started": str(start_of(run.path) or "")[:16]}
            for name, run in chosen
        ],
        "figures": [
            {
                "name": name,
                "share": any(of_run[name][1] for of_run in figures if name in of_run),
                "values": [of_run[name][0] if name in of_run else None for of_run in figures],
            }
            for name in names
        ],
        "differences": [asdict(row) for row in differences if "webhook" not in row.key],
    }
