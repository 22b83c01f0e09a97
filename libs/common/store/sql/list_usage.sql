-- Usage, newest first, before a row.
select turn, seam, thread, agent, user_id, model, input_tokens, output_tokens, model_calls, tool_calls, seconds,
  (extract(epoch from at) * 1000)::bigint as at_ms
from usage_events
where (%(users)s::text[] is null or user_id = any (%(users)s::text[]))
  and (%(thread)s::uuid is null or thread = %(thread)s::uuid)
  and (%(agent)s::text is null or agent = %(agent)s)
  and (%(day)s::date is null or (at >= %(day)s::date::timestamp at time zone 'UTC'
                                 and at < (%(day)s::date + 1)::timestamp at time zone 'UTC'))
  and (%(before_ms)s::bigint is null
       or (at, turn, seam) < (to_timestamp(%(before_ms)s::float8 / 1000), %(before_turn)s::uuid, %(before_seam)s::text))
order by at desc, turn desc, seam desc
limit %(limit)s
