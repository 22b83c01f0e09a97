-- Define an agent, or anew; of two callers at once the last one counts. A secret that was not given stays, but is not
-- sent to another URL than the one it was given for.
insert into agents as a
  (agent, kind, url, model, instructions, tools, api_key, signing_secret, turn_cap_s)
values (%(agent)s, %(kind)s, %(url)s, %(model)s, %(instructions)s, %(tools)s::text[], %(api_key)s, %(signing_secret)s,
  %(turn_cap_s)s)
on conflict (agent) do update set
  kind = excluded.kind, url = excluded.url, model = excluded.model, instructions = excluded.instructions,
  tools = excluded.tools, turn_cap_s = excluded.turn_cap_s,
  api_key = coalesce(excluded.api_key, case when a.url is not distinct from excluded.url then a.api_key end),
  signing_secret = coalesce(
    excluded.signing_secret, case when a.url is not distinct from excluded.url then a.signing_secret end)
returning agent, kind, url, model, instructions, tools, api_key, signing_secret, turn_cap_s,
  (extract(epoch from created_at) * 1000)::bigint as created_ms, xmax = 0 as created
