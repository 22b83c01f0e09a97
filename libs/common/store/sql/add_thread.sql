-- Begin a thread of an agent, if there is that agent. Repeated with the same id it changes nothing.
insert into threads (thread, agent, user_id, model)
select %(thread)s::uuid, agent, %(user)s::text, %(model)s::text from agents where agent = %(agent)s
on conflict (thread) do update set thread = excluded.thread
returning thread, agent, user_id, model, next_position - 1 as entries,
  (extract(epoch from created_at) * 1000)::bigint as created_ms,
  (extract(epoch from used_at) * 1000)::bigint as used_ms
