-- Turns without a terminal whose task will not bring one (rule 32), or that are to be cancelled and that nobody runs:
-- what waits for its next attempt would hear of that only then.
select t.turn, coalesce(k.state, 'missing') as task_state, t.cancel_requested_at is not null as cancel_requested
from turns t left join absurd.t_turns k on k.task_id = t.task
where t.ended_at is null and t.task is not null
  and (k.state is null or k.state in ('completed', 'failed', 'cancelled')
    or (t.cancel_requested_at is not null and k.state in ('pending', 'sleeping')))
order by t.turn limit %(limit)s
