"""An OpenAI server over the engine: `tk serve MODEL`, and `create_api_server` for one's own program."""
