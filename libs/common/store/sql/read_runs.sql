-- Runs with their sources, a row for each source, in the order in which they were given.
select r.run, r.progress_types, r.terminal_types, r.stall_after_s, r.max_duration_s, r.state, r.reason,
  (extract(epoch from r.created_at) * 1000)::bigint as created_ms,
  (extract(epoch from r.ended_at) * 1000)::bigint as ended_ms,
  (extract(epoch from clock_timestamp() - r.created_at) * 1000)::bigint as age_ms,
  r.first_seq, r.last_seq, r.epoch,
  s.source, s.url, s.secrets, s.resume, s.idle_timeout_s, s.uid, s.count, s.state as source_state,
  s.reason as source_reason, s.detail as source_detail
from runs r join run_sources s using (run)
where r.run = any(%(runs)b::text[])
order by r.run, s.place
