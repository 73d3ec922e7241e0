"""A server that speaks SGLang's routes, with the field names of the real one (tests/golden/sglang_fields.json): an
unknown field is refused, as the real one does. The model counts upwards from the prompt's last token."""

import asyncio
import base64
import contextlib
import json
import struct
from pathlib import Path

from aiohttp import web
from safetensors import safe_open

FIELDS = json.loads((Path(__file__).parent.parent / "golden" / "sglang_fields.json").read_text())
MODULO = 1000


class Running:
    def __init__(self, body):
        self.body, self.tokens, self.spans, self.aborted = body, [], [], False


class StandIn:
    """`incremental`: as with --incremental-streaming-output. layers: of the model, where the server was started with
    --enable-return-routed-experts; a token goes through experts token % 8 + layer and the next one."""

    def __init__(self, *, step_s=0.005, incremental=False, end=None, layers=0):
        self.step_s, self.incremental, self.end, self.layers = step_s, incremental, end, layers
        self.calls, self.bodies = [], []
        self.version, self.paused, self.flushes_refused = "default", "", 0
        self.running, self.loaded, self.refuse_weights = {}, [], ""
        self.address, self.released = "", False
        self.arguments = {"enable_memory_saver": True, "enable_weights_cpu_backup": True}
        self._go = asyncio.Event()
        self._go.set()

    @contextlib.asynccontextmanager
    async def serve(self):
        application = web.Application(client_max_size=2**26)
        routes = ["generate", "pause_generation", "continue_generation", "flush_cache", "abort_request"]
        routes += ["release_memory_occupation", "resume_memory_occupation"]
        application.router.add_get("/server_info", self.server_info)
        for name in [*routes, "update_weights_from_disk"]:
            application.router.add_post(f"/{name}", self._checked(getattr(self, name)))
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = "http://{}:{}".format(*runner.addresses[0][:2])
        try:
            yield self
        finally:
            await runner.cleanup()

    def _checked(self, handler):
        async def handle(request):
            self.calls.append(request.path)
            body = await request.json() if request.can_read_body else None
            if body is not None:
                self.bodies.append((request.path, body))
                unknown = body.keys() - set(FIELDS[request.path])
                unknown |= body.get("sampling_params", {}).keys() - set(FIELDS["sampling_params"])
                if unknown:
                    return web.Response(status=422, text=f"unknown fields {sorted(unknown)}")
            return await handler(request, body)

        return handle

    async def generate(self, request, body):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        run = self.running[body["rid"]] = Running(body)
        limit, at = body["sampling_params"]["max_new_tokens"], body["input_ids"][-1]
        finish = None
        while finish is None:
            await asyncio.sleep(self.step_s)
            await self._go.wait()
            if run.aborted:
                finish = {"type": "abort", "message": "Abort in waiting queue"}
            else:
                at = (at + 1) % MODULO
                run.tokens.append(at)
                if not run.spans or run.spans[-1]["version"] != self.version:
                    run.spans.append({"version": self.version, "start": len(run.tokens) - 1, "end": 0})
                run.spans[-1]["end"] = len(run.tokens)
                if at == self.end:
                    finish = {"type": "stop", "matched": at}
                elif len(run.tokens) >= limit:
                    finish = {"type": "length", "length": limit}
            listed = [[-0.1 * token, token, None] for token in run.tokens]
            fresh = [] if run.aborted else listed[-1:]
            meta = {
                "id": body["rid"],
                "finish_reason": finish,
                "completion_tokens": len(run.tokens),
                "output_token_logprobs": fresh if self.incremental else listed,
                "weight_version": self.version,
                "weight_versions": run.spans,
            }
            if finish is not None and self.layers and body.get("return_routed_experts"):
                meta["routed_experts"] = self._routed([*body["input_ids"], *run.tokens][:-1])
            await response.write(f"data: {json.dumps({'text': '', 'meta_info': meta})}\n\n".encode())
        self.running.pop(body["rid"])
        await response.write(b"data: [DONE]\n\n")
        return response

    def _routed(self, tokens):
        ids = [t % 8 + layer + k for t in tokens for layer in range(self.layers) for k in range(2)]
        return base64.b64encode(struct.pack(f"<{len(ids)}i", *ids)).decode()

    async def pause_generation(self, request, body):
        self.paused = body["mode"]
        self._go.clear()
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, request, body):
        self.paused = ""
        self._go.set()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def server_info(self, request):
        return web.json_response(self.arguments)

    async def release_memory_occupation(self, request, body):
        assert not self.running  # the real one ends
        self.released = True
        return web.Response()

    async def resume_memory_occupation(self, request, body):
        assert self.released
        self.released = False
        return web.Response()

    async def flush_cache(self, request, body):
        if self.flushes_refused:
            self.flushes_refused -= 1
            return web.Response(status=400, text="Flush cache failed: 1 request is running")
        return web.Response(text="Cache flushed.")

    async def update_weights_from_disk(self, request, body):
        assert self.paused
        if self.refuse_weights:
            return web.json_response({"success": False, "message": self.refuse_weights}, status=400)
        with safe_open(Path(body["model_path"]) / "model.safetensors", "pt") as opened:
            self.loaded.append({name: tuple(opened.get_tensor(name).shape) for name in opened.keys()})  # noqa: SIM118
        self.version = body["weight_version"]
        return web.json_response({"success": True, "message": "Succeeded.", "num_paused_requests": 0})

    async def abort_request(self, request, body):
        if body["rid"] in self.running:
            self.running[body["rid"]].aborted = True
        return web.Response(status=200)
