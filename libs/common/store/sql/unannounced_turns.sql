-- Turns that ended a while ago, and nobody said that it is in the thread's log.
select r.* from turns t join turn_records r using (turn)
where t.ended_at is not null and t.announced_at is null
  and t.ended_at <= now() - %(after_s)s * interval '1 second'
  and t.ended_at > now() - %(until_s)s * interval '1 second'
order by t.ended_at limit %(limit)s
