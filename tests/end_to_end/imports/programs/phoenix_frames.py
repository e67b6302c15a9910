"""Writes spans and annotations as Phoenix's client gives them: `phoenix_frames.py URL FOLDER`."""

import sys
from pathlib import Path

from phoenix.client import Client

url, folder = sys.argv[1], Path(sys.argv[2])
spans = Client(base_url=url).spans
frame = spans.get_spans_dataframe(project_identifier="agent", limit=10_000)
annotations = spans.get_span_annotations_dataframe(spans_dataframe=frame, project_identifier="agent", limit=10_000)
frame.to_json(folder / "spans.jsonl", orient="records", lines=True, date_format="iso", date_unit="ns")
annotations.reset_index().to_json(folder / "annotations.jsonl", orient="records", lines=True)
