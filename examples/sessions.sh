#!/bin/sh
# Sessions by curl: a context that is forked, rewound and saved without computing anything again.
#
#   quire serve &
#   sh examples/sessions.sh
set -eu
URL=${1:-http://127.0.0.1:8080}
ask() {
  method=$1 path=$2 body=${3:-}
  curl -sS -X "$method" "$URL$path" -H 'Content-Type: application/json' ${body:+-d "$body"}
  echo
}

ask POST /v1/sessions '{"id": "story", "prompt": "Once upon a time there was a miller"}'
ask POST /v1/sessions/story/checkpoint '{"name": "miller"}'
ask POST /v1/completions '{"session_id": "story", "prompt": " who had", "max_tokens": 16}'

# A branch shares every page with where it comes from.
ask POST /v1/sessions/story/fork '{"id": "branch"}'
ask POST /v1/completions '{"session_id": "branch", "prompt": " But then", "max_tokens": 16}'

# Back to the mark; a second beginning costs only its own tokens.
ask POST /v1/sessions/story/rewind '{"to": "miller"}'
ask POST /v1/completions '{"session_id": "story", "prompt": " whose daughter", "max_tokens": 16}'

ask POST /v1/sessions/story/save '{"name": "miller"}'
ask GET /v1/sessions
ask DELETE /v1/sessions/branch
ask DELETE /v1/sessions/story
