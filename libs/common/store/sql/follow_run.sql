-- Follow a run, and tell the relays at commit. No row: its id is known, whoever came first. Of two callers at once the
-- second waits for the first, and gets none.
with added as (
  insert into runs (run, progress_types, terminal_types, stall_after_s, max_duration_s)
  values (%(run)s, %(progress_types)s::text[], %(terminal_types)s::text[], %(stall_after_s)s, %(max_duration_s)s)
  on conflict (run) do nothing
  returning run
), sources as (
  insert into run_sources (run, source, place, url, secrets, resume, idle_timeout_s)
  select added.run, v.source, v.place, v.url, v.secrets, v.resume, v.idle_timeout_s
  from added, unnest(%(sources)b::text[], %(urls)b::text[], %(secrets)b::bytea[], %(resumes)b::text[],
                     %(idles)b::float8[])
    with ordinality as v(source, url, secrets, resume, idle_timeout_s, place)
)
select run, pg_notify('towline_runs', run)::text as told from added
