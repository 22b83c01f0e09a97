-- The same run was given once more: its newest headers count, and whoever follows it is told at commit. Sources given
-- without any keep what they have.
with replaced as (
  update run_sources s
  set secrets = v.secrets
  from unnest(%(sources)b::text[], %(secrets)b::bytea[]) as v(source, secrets), runs r
  where s.run = %(run)s and s.source = v.source and v.secrets is not null and r.run = s.run and r.ended_at is null
  returning s.run
)
select pg_notify('towline_runs', run)::text as told from (select distinct run from replaced) one
