"""The server: OpenAI's API over models whose contexts are resources.

    app.py        routes and middleware          serving.py   uvicorn, signals, draining
    state.py      what all requests share        models.py    which models there are, and loaded
    admission.py  who may start                  run.py       one request on the engine, followed
    arrivals.py   who comes together             turn.py      from its beginning to its end
    *_routes.py   one file for each dialect or resource: parse, start a run, write what comes
    protocol.py   HTTP over a connection         guards.py    who may ask, and how much
    records.py    each request's id, log line and metrics      live.py   what the page follows
    page/         the page at `/`: plain files, no build step   page_map.py   who holds which pages

request → guards → route: msgspec type → `Ask` → admission → `Run` → deltas → JSON or SSE
"""
