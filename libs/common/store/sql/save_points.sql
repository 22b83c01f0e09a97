-- Resume points of many sources, from owners no older than any that wrote before. Sorted, so that two cannot deadlock.
with v as (
  select * from unnest(%(runs)b::text[], %(epochs)b::bigint[], %(sources)b::text[], %(uids)b::text[],
                       %(counts)b::bigint[]) as v(run, epoch, source, uid, count)
), locked as (
  select r.run from runs r
  where r.ended_at is null and exists (select from v where v.run = r.run and v.epoch >= r.saved_epoch)
  order by r.run for update
), fenced as (
  update runs r set saved_epoch = v.epoch
  from locked join (select run, max(epoch) as epoch from v group by run) v using (run)
  where r.run = locked.run
)
update run_sources s set uid = v.uid, count = v.count
from locked join v using (run)
where s.run = v.run and s.source = v.source
