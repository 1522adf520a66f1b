"""What administrators do in the browser: webhooks, quotas, machines with GPUs."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.dashboard.browser import settled, sign_in
from tests.dashboard.long_jobs import USUAL
from tests.dashboard.played_node import PlayedNode, training
from tests.running_service import Service

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@dataclass
class Receiver:
    """A server for webhooks, which takes them or not."""

    takes: bool = False
    url: str = ""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.messages.append((str(self.headers["webhook-id"]), json.loads(body)))
            text = b"taken" if receiver.takes else b"out of paper"
            self.send_response(200 if receiver.takes else 500)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield receiver
        server.shutdown()
        thread.join(10)


def test_a_delivery_that_failed_is_sent_again(
    played_service: Service, page: Any, receiver: Receiver
) -> None:
    sign_in(page, played_service.stack.url, played_service.stack.api_key, "/webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("URL").fill(receiver.url)
    page.get_by_role("button", name="Make it").click()
    assert page.locator(".secret").inner_text().startswith("whsec_")
    page.get_by_role("button", name="I have kept it").click()

    page.get_by_role("button", name="Deliveries", exact=True).click()
    page.get_by_text("Nothing was sent yet").wait_for()
    page.get_by_role("button", name="Test", exact=True).click()
    row = page.get_by_role("region", name="Deliveries").locator("tbody tr")
    row.get_by_text("failed").wait_for()
    assert "500" in row.inner_text()
    refused = len(receiver.messages)

    # What the server answered is told, and the same message is sent again by hand.
    row.get_by_role("button", name="Look").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_text("out of paper").first.wait_for()
    receiver.takes = True
    dialog.get_by_role("button", name="Send it again").click()
    dialog.get_by_text(re.compile("· delivered")).wait_for()
    assert len(receiver.messages) == refused + 1
    assert len({message for message, _ in receiver.messages}) == 1
    dialog.get_by_role("button", name="Close").click()
    row.get_by_text("delivered").wait_for()


def test_quotas_are_set_changed_and_taken_away(played_service: Service, page: Any) -> None:
    def quotas() -> dict[str, Any]:
        return {
            each["owner"]: (each["queued"], each["running"], each["gpu_hours"])
            for each in played_service.http.get("/v1/quotas").json()["items"]
        }

    sign_in(page, played_service.stack.url, played_service.stack.api_key, "/usage")
    page.get_by_role("button", name="Quotas for an owner").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_role("button", name="Set").is_disabled(), "for nobody"
    dialog.get_by_label("Owner").fill("ada")
    dialog.get_by_label("Jobs in the queue").fill("-1")
    dialog.get_by_role("button", name="Set").click()
    dialog.get_by_role("alert").wait_for()
    dialog.get_by_label("Jobs in the queue").fill("5")
    dialog.get_by_label("GPU-hours in the window").fill("12.5")
    dialog.get_by_role("button", name="Set").click()
    page.get_by_text("The quotas of ada are set").wait_for()
    assert quotas() == {"ada": (5, None, 12.5)}

    page.get_by_role("button", name="Change the quotas of ada").click()
    dialog = page.get_by_role("dialog", name="Quotas of ada")
    assert dialog.get_by_label("Jobs in the queue").input_value() == "5"
    dialog.get_by_label("Jobs in the queue").fill("")
    dialog.get_by_label("Jobs on nodes").fill("2")
    dialog.get_by_role("button", name="Set").click()
    dialog.wait_for(state="detached")
    assert quotas() == {"ada": (None, 2, 12.5)}

    page.get_by_role("button", name="Take the own quotas of ada away").click()
    page.get_by_text("No owner has quotas of their own.").wait_for()
    assert quotas() == {}


def test_gpus_of_a_node_and_of_a_job_on_it(played_service: Service, page: Any) -> None:
    with PlayedNode(played_service, "gpu-node", gpus=2) as node:
        job = node.take("on-a-gpu", training={"steps": 50})
        node.send(job, list(training(USUAL, range(1, 51))))
        node.report_gpus(samples=30)
        with page.expect_response(lambda answer: "/v1/jobs?" in answer.url) as asked:
            sign_in(page, played_service.stack.url, played_service.stack.api_key, "/nodes")
        # What runs where is asked every few seconds: without what cards do not show.
        placed = {told["id"]: set(told) for told in asked.value.json()["items"]}
        assert placed[job.id] == {"id", "name", "status", "attempts"}
        card = page.locator(".card").filter(has=page.get_by_role("heading", name="gpu-node"))
        held = card.get_by_role("meter", name=re.compile("GPU 0 · NVIDIA H200 · .* · in use"))
        free = card.get_by_role("meter", name=re.compile("GPU 1 · NVIDIA H200 · .* · free"))
        use = [float(meter.get_attribute("value")) for meter in (held, free)]
        told = played_service.http.get(f"/v1/nodes/{node.id}/metrics").json()["samples"][-1]["gpus"]
        assert use == pytest.approx([gpu["utilization"] for gpu in told], abs=0.15)
        card.get_by_role("link", name="on-a-gpu").click()

        # Its charts, each with the newest figure as text beside it.
        settled(page)
        newest = played_service.object(job.id)["latest_metrics"]
        assert newest, "the job has figures"
        for title in ("GPU utilization", "GPU memory", "GPU power, W"):
            chart = page.locator(".chart").filter(
                has=page.get_by_role("heading", name=title, exact=True)
            )
            chart.scroll_into_view_if_needed()
            chart.locator("canvas").wait_for()
            assert "step 50" in chart.locator(".readout").inner_text()
        tiles = page.locator(".tile").filter(has_text="Runs on").inner_text()
        assert "GPU" in tiles
        assert "gpu-node" in tiles
        node.beat()
