-- How turns end: whoever ends one knows that it did, and what was begun has a row of usage whoever ends it.
-- `towline_end_turn` and `towline_cancel_turn` stay for the release before this one.

alter table turns add column ended_by uuid;  -- the attempt that ended it, or the call

-- End a turn (rules 1, 31): the reply, the terminal and the usage, and have the thread's next turn taken; all or nothing.
-- p_run: the attempt that ends it, which must still hold its claim; null: nobody's, and its task is cancelled.
-- p_call: the same when a call is repeated; with `completed` the reply's id.
-- Returns the record, and whether this attempt or call ended the turn; where it is open in it, the claim was lost and
-- nothing was written. No row: no such turn.
create function towline_finish_turn(
  p_turn uuid, p_run uuid, p_call uuid, p_state text, p_text text, p_code text, p_message text, p_usage jsonb, p_task jsonb
) returns table (is_own boolean, turn turn_records) language plpgsql as $$
#variable_conflict use_column
declare
  v_by uuid := coalesce(p_run, p_call);
  v_thread threads;
  v_turn turns;
  v_next uuid;
begin
  select h.* into v_thread from threads h join turns t using (thread) where t.turn = p_turn for update of h;
  select * into v_turn from turns t where t.turn = p_turn for update;
  if v_turn.ended_at is null and (p_run is null or (towline_lock_run(p_run) and exists (
    select from absurd.r_turns r where r.run_id = p_run and r.task_id = v_turn.task)))
  then
    if p_run is null and exists (select from absurd.t_turns k where k.task_id = v_turn.task) then
      perform absurd.cancel_task('turns', v_turn.task);
    end if;
    if p_state = 'completed' then
      insert into entries (entry, thread, position, role, text, turn)
      values (p_call, v_turn.thread, v_thread.next_position, 'agent', p_text, p_turn);
    end if;
    update threads h set next_position = h.next_position + (p_state = 'completed')::int, used_at = clock_timestamp()
    where h.thread = v_turn.thread;
    update turns t set state = p_state, reply = case when p_state = 'completed' then p_call end, error_code = p_code,
      error_message = p_message, ended_at = clock_timestamp(), ended_by = v_by
    where t.turn = p_turn;
    insert into usage_events
      (turn, seam, thread, agent, user_id, model, input_tokens, output_tokens, model_calls, tool_calls, seconds)
    select p_turn, u.seam, v_turn.thread, v_thread.agent, v_thread.user_id, u.model, u.input_tokens, u.output_tokens,
      u.model_calls, u.tool_calls, u.seconds
    from jsonb_to_recordset(p_usage) as u(
      seam text, model text, input_tokens bigint, output_tokens bigint, model_calls integer, tool_calls integer,
      seconds double precision)
    on conflict (turn, seam) do nothing;
    if p_run is null and v_turn.started_at is not null then
      -- What its attempts have used died with them; that there were some is kept.
      insert into usage_events
        (turn, seam, thread, agent, user_id, input_tokens, output_tokens, model_calls, tool_calls, seconds)
      values (p_turn, 'reply', v_turn.thread, v_thread.agent, v_thread.user_id, 0, 0, 0, 0,
        extract(epoch from clock_timestamp() - v_turn.started_at))
      on conflict (turn, seam) do nothing;
    end if;
    select t.turn into v_next from turns t
    where t.thread = v_turn.thread and t.ended_at is null order by t.number limit 1;
    if v_next is not null and not exists (
      select from turns t where t.thread = v_turn.thread and t.ended_at is null and t.task is not null)
    then
      perform towline_spawn_turn(v_next, p_task);
    end if;
  end if;
  return query
    select coalesce(t.ended_by = v_by, false), r
    from turns t join turn_records r on r.turn = t.turn where t.turn = p_turn;
end
$$;

-- Cancel a turn: at once when nobody runs it, else have its worker told. p_call, and what it returns: as above.
create function towline_stop_turn(p_turn uuid, p_call uuid, p_code text, p_message text, p_task jsonb)
returns table (is_own boolean, turn turn_records) language plpgsql as $$
#variable_conflict use_column
declare
  v_turn turns;
begin
  perform from threads h join turns t using (thread) where t.turn = p_turn for update of h;
  select * into v_turn from turns t where t.turn = p_turn for update;
  if v_turn.ended_at is null
    and exists (select from absurd.r_turns r where r.task_id = v_turn.task and r.state = 'running')
  then
    update turns t set cancel_requested_at = coalesce(t.cancel_requested_at, clock_timestamp())
    where t.turn = p_turn;
    perform pg_notify('towline_turns', 'cancel:' || p_turn);
    return query select false, r from turn_records r where r.turn = p_turn;
  else
    return query
      select f.is_own, f.turn
      from towline_finish_turn(p_turn, null, p_call, 'cancelled', null, p_code, p_message, null, p_task) f;
  end if;
end
$$;
