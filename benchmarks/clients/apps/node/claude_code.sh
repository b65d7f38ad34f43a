# Claude Code: one session, three prompts, one of which makes it read a file.
set -e
say() { claude --print "$@" < /dev/null; }
first=$(say "What is the weather in Bern? It is in weather.txt.")
second=$(say --continue "Is it warmer than in Rome?")
third=$(say --continue "Thank you. What should I wear?")
printf '{"answers": ["%s", "%s", "%s"], "id": null}\n' "$first" "$second" "$third"
