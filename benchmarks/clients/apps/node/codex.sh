# Codex: one session, three prompts, one of which makes it read a file.
set -e
mkdir -p "$HOME/.codex"
cat > "$HOME/.codex/config.toml" <<END
model = "$MODEL"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "$OPENAI_BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
END
# The sandbox of its commands needs rights that a container may lack.
say() { codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "$@" < /dev/null; }
first=$(say "What is the weather in Bern? It is in weather.txt.")
second=$(say resume --last "Is it warmer than in Rome?")
third=$(say resume --last "Thank you. What should I wear?")
printf '{"answers": ["%s", "%s", "%s"], "id": null}\n' "$first" "$second" "$third"
