-- Lease epochs (rule 14), in microseconds: with them the numbers of a stream born anew stay above those of the lost one
-- even if Redis's clock was set back. Ended runs get none. Sorted, so that two callers cannot deadlock.
with locked as (
  select run from runs where run = any(%(runs)b::text[]) and ended_at is null order by run for update
)
update runs r
set epoch = greatest(r.epoch + 1, (extract(epoch from clock_timestamp()) * 1000000)::bigint)
from locked
where r.run = locked.run
returning r.run, r.epoch
