-- Note that the ends of turns are in their threads' logs. Sorted, so that two callers cannot deadlock.
with ended as (
  select turn from turns
  where turn = any (%(turns)s::uuid[]) and ended_at is not null and announced_at is null
  order by turn for update
)
update turns t set announced_at = now() from ended where t.turn = ended.turn
