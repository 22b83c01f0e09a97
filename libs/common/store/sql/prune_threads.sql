-- Forget threads that nobody used for long. One with an open turn is in use.
with old as (
  select thread from threads h
  where used_at <= now() - %(retention_s)s * interval '1 second'
    and not exists (select from turns t where t.thread = h.thread and t.ended_at is null)
  order by used_at limit %(limit)s for update skip locked
)
delete from threads h using old where h.thread = old.thread returning h.thread
