-- Agents, by name, after one.
select agent, kind, url, model, instructions, tools, api_key, signing_secret, turn_cap_s,
  (extract(epoch from created_at) * 1000)::bigint as created_ms
from agents where %(after)s::text is null or agent > %(after)s
order by agent limit %(limit)s
