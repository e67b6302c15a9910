"""A web service with an agent, as somebody else runs it: `GET /ask?text=…` answers and names the response.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 opentelemetry-instrument uvicorn app:app --port 8090
"""

from fastapi import FastAPI
from openai import AsyncOpenAI

app = FastAPI()
client = AsyncOpenAI(max_retries=0)


@app.get("/ask")
async def ask(text: str) -> dict[str, str]:
    """The answer, and the id of the response that a click refers to."""
    response = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}], max_tokens=12
    )
    return {"answer": response.choices[0].message.content or "", "id": response.id}


@app.get("/idle")
def idle() -> str:
    return "idle"
