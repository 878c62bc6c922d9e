"""``rl-harness run`` as a process, where the core is all there is. What a run does is in ``tests/jobs``."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from aiohttp import web
from aiohttp.test_utils import TestServer

WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "safetensors"):
    sys.modules[name] = None  # importing it raises ImportError
from rl_harness.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


async def test_any_api_model_is_evaluated_without_torch(tmp_path: Path) -> None:
    for number in range(6):
        task = tmp_path / "tasks" / f"task-{number}"
        task.mkdir(parents=True)
        (task / "instruction.md").write_text("What is the answer?\n")
        (task / "task.toml").write_text('schema_version = "1.4"\n\n[rl_harness]\nanswer = "42"\n')

    async def stream(request: web.Request) -> web.StreamResponse:
        assert (await request.json())["model"] == "acme-large"
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for delta, reason in (({"role": "assistant", "content": "4"}, None), ({"content": "2"}, None), ({}, "stop")):
            chunk = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
        usage = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}
        await response.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())
        return response

    app = web.Application()
    app.router.add_post("/v1/chat/completions", stream)
    async with TestServer(app) as server:
        arguments = ["run", "./tasks", "--harness", "chat", "--model", "acme-large", "--json"]
        arguments += ["--base-url", str(server.make_url("/v1"))]
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            WITHOUT_TORCH,
            *arguments,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    summary = json.loads(out)["evaluations"][0]["summary"]
    assert (summary["passed"], summary["scored"]) == (6, 6)
