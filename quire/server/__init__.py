"""The server: OpenAI's API over models whose contexts are resources.

    app.py        routes and middleware          serving.py   uvicorn, signals, draining
    state.py      what all requests share        models.py    which models there are, and loaded
    admission.py  who may start                  run.py       one request on the engine, followed
    *_routes.py   one file for each dialect or resource: parse, start a run, write what comes

request → guards → route: msgspec type → `Ask` → admission → `Run` → deltas → JSON or SSE
"""
