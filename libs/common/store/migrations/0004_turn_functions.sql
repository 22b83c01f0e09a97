-- What is done to turns, each in one call. The order of locks is that of 0003_turns.sql.

-- Have a turn taken by a worker. p_task: Absurd's options for it, and limit_margin_s, beyond the cap.
create function towline_spawn_turn(p_turn uuid, p_task jsonb) returns void language plpgsql as $$
begin
  update turns t set task = s.task_id
  from turns own, absurd.spawn_task(
    'turns', 'turn', jsonb_build_object('turn', own.turn),
    (p_task - 'limit_margin_s') || jsonb_build_object(
      'idempotency_key', own.turn,
      'cancellation', jsonb_build_object('max_duration', floor(own.cap_s) + (p_task->>'limit_margin_s')::int))) s
  where own.turn = p_turn and t.turn = own.turn;
end
$$;

-- Post an entry: it, its turn, and the turn's task when nothing is ahead of it, or what its key stands for already.
-- Of two callers at once the second waits for the first. A call that is repeated with the same p_turn finds itself.
-- verdict: created | known (entry_text: what was posted) | busy (on_busy = reject; the turn that is open) | no-thread |
-- no-agent.
create function towline_post_entry(
  p_thread uuid, p_entry uuid, p_turn uuid, p_text text, p_key text, p_fingerprint bytea, p_on_busy text,
  p_traceparent text, p_retention_s double precision, p_task jsonb
) returns table (verdict text, turn turn_records, entry_text text) language plpgsql as $$
#variable_conflict use_column
declare
  v_thread threads;
  v_turn uuid;       -- the one that is returned
  v_ahead turns;     -- the first one that is open
  v_known turns;
  v_cap_s double precision;
  v_now timestamptz;
begin
  verdict := 'created';
  v_turn := p_turn;
  select * into v_thread from threads h where h.thread = p_thread for update;
  v_now := clock_timestamp();  -- under the lock: a thread's entries have their times in their order
  select * into v_known from turns t where t.thread = p_thread and t.key = p_key;
  if v_known.ended_at <= v_now - p_retention_s * interval '1 second' and v_known.turn <> p_turn then
    update turns t set key = null where t.turn = v_known.turn;
    v_known := null;
  end if;
  select * into v_ahead from turns t where t.thread = p_thread and t.ended_at is null order by t.number limit 1;
  select a.turn_cap_s into v_cap_s from agents a where a.agent = v_thread.agent;
  if v_known.turn is not null then
    v_turn := v_known.turn;
    if v_turn <> p_turn then
      verdict := 'known';
      update turns t set replays = t.replays + 1 where t.turn = v_turn;
    end if;
  elsif v_thread.thread is null then
    verdict := 'no-thread';
  elsif v_cap_s is null then
    verdict := 'no-agent';
  elsif v_ahead.turn is not null and p_on_busy = 'reject' then
    verdict := 'busy';
    v_turn := v_ahead.turn;
  else
    insert into entries (entry, thread, position, role, text, turn, created_at)
    values (p_entry, p_thread, v_thread.next_position, 'user', p_text, p_turn, v_now);
    insert into turns (turn, thread, number, entry, key, fingerprint, traceparent, cap_s, created_at)
    values (p_turn, p_thread, v_thread.next_position, p_entry, p_key, p_fingerprint, p_traceparent, v_cap_s, v_now);
    update threads h set next_position = h.next_position + 1, used_at = v_now where h.thread = p_thread;
    if v_ahead.turn is null then
      perform towline_spawn_turn(p_turn, p_task);
    elsif p_on_busy = 'interrupt' then
      update turns t set cancel_requested_at = coalesce(t.cancel_requested_at, v_now)
      where t.turn = v_ahead.turn;
      perform pg_notify('towline_turns', 'cancel:' || v_ahead.turn);
    end if;
  end if;
  return query
    select verdict, r, e.text from (select 1) one
    left join turn_records r on r.turn = v_turn
    left join entries e on e.entry = r.entry and verdict = 'known';
end
$$;

-- Claim turns: those of this worker that it does not hold (their hand-over was lost), then what is there to be taken.
-- What an expired claim held is taken in the same call: Absurd's claim_task only makes it takeable. So is what this
-- worker had begun and let go of without a word: as another attempt, which fences what may be left of that one. (After
-- a release an attempt counts as begun: a hand-over that is lost then costs one.)
create function towline_claim_turns(p_worker text, p_claim_s integer, p_places integer, p_held uuid[])
returns table (run uuid, task uuid, attempt integer, turn uuid) language plpgsql as $$
declare
  v_found integer := 0;
  v_added integer;
  v_expired boolean;
  v_begun boolean;
begin
  for run, task, attempt, turn, v_begun in
    select r.run_id, r.task_id, r.attempt, (k.params->>'turn')::uuid, coalesce(t.attempts >= r.attempt, false)
    from absurd.r_turns r join absurd.t_turns k using (task_id) left join turns t on t.task = r.task_id
    where r.state = 'running' and r.claimed_by = p_worker and r.run_id <> all (p_held)
    order by r.run_id for update of r
  loop
    exit when v_found >= p_places;
    if v_begun then
      perform absurd.fail_run('turns', run, '{"message": "its worker let go of it"}');
    else
      perform absurd.extend_claim('turns', run, p_claim_s);
      v_found := v_found + 1;
      return next;
    end if;
  end loop;
  for round in 1..2 loop
    exit when v_found >= p_places;
    v_expired := exists (
      select from absurd.r_turns r where r.state = 'running' and r.claim_expires_at <= absurd.current_time());
    return query
      select c.run_id, c.task_id, c.attempt, (c.params->>'turn')::uuid
      from absurd.claim_task('turns', p_worker, p_claim_s, p_places - v_found) c;
    get diagnostics v_added = row_count;
    v_found := v_found + v_added;
    exit when not v_expired;
  end loop;
end
$$;

-- Begin an attempt. verdict: begun | ended (publish and complete) | lost (the claim is another's) | gone (no such turn).
-- is_first: nobody has begun the turn before this claim was made, so that a repeated call says what the first one said.
create function towline_begin_turn(p_turn uuid, p_run uuid, p_attempt integer)
returns table (verdict text, is_first boolean, elapsed_ms bigint, entry_text text, turn turn_records) language plpgsql as $$
#variable_conflict use_column
declare
  v_turn turns;
  v_claimed_at timestamptz;
begin
  select * into v_turn from turns t where t.turn = p_turn for update;
  if v_turn.turn is null then
    verdict := 'gone';
  elsif v_turn.ended_at is not null then
    verdict := 'ended';
  else
    select r.started_at into v_claimed_at
    from absurd.r_turns r where r.run_id = p_run and r.task_id = v_turn.task and r.state = 'running' for update;
    if found then
      verdict := 'begun';
      is_first := v_turn.started_at is null or v_turn.started_at >= v_claimed_at;
      update turns t set state = 'running', attempts = greatest(t.attempts, p_attempt),
        started_at = coalesce(t.started_at, clock_timestamp())
      where t.turn = p_turn;
    else
      verdict := 'lost';
    end if;
  end if;
  return query
    select verdict, is_first, (extract(epoch from clock_timestamp()) * 1000)::bigint - r.started_ms, e.text, r
    from (select 1) one left join turn_records r on r.turn = p_turn left join entries e on e.entry = r.entry;
end
$$;

-- Keep claims: returns those that are still held, and whether their turn is to be cancelled.
create function towline_keep_turns(p_runs uuid[], p_claim_s integer)
returns table (run uuid, cancel_requested boolean) language plpgsql as $$
#variable_conflict use_column
begin
  for run, cancel_requested in
    select r.run_id, coalesce(t.cancel_requested_at is not null, false)
    from absurd.r_turns r left join turns t on t.task = r.task_id
    where r.run_id = any (p_runs) and r.state = 'running' and r.claim_expires_at is not null
    order by r.run_id for update of r
  loop
    perform absurd.extend_claim('turns', run, p_claim_s);
    return next;
  end loop;
end
$$;

-- Lock an attempt that is still its worker's; says whether it is.
create function towline_lock_run(p_run uuid) returns boolean language plpgsql as $$
begin
  perform from absurd.r_turns r where r.run_id = p_run and r.state = 'running' for update;
  return found;
end
$$;

-- Checkpoint a step (rule 30): with its run row locked, so that no attempt that lost its claim overwrites another's.
create function towline_checkpoint(p_task uuid, p_run uuid, p_step text, p_state jsonb, p_claim_s integer)
returns boolean language plpgsql as $$
begin
  if not towline_lock_run(p_run) then
    return false;
  end if;
  perform absurd.set_task_checkpoint_state('turns', p_task, p_step, p_state, p_run, p_claim_s);
  return true;
end
$$;

-- End a turn (rules 1, 31): the reply, the terminal and the usage, and have the thread's next turn taken; all or nothing.
-- p_run: the attempt that ends it, which must still hold its claim; null: nobody's, and its task is cancelled.
-- p_call: the same when a call is repeated; with `completed` the reply's id.
-- Returns the record, and whether this attempt or call ended the turn; where it is open in it, the claim was lost and
-- nothing was written. No row: no such turn.
create function towline_end_turn(
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
create function towline_cancel_turn(p_turn uuid, p_call uuid, p_code text, p_message text, p_task jsonb)
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
      from towline_end_turn(p_turn, null, p_call, 'cancelled', null, p_code, p_message, null, p_task) f;
  end if;
end
$$;

-- Complete an attempt whose turn's terminal is published; false when it is not this worker's any more.
create function towline_complete_turn(p_turn uuid, p_run uuid) returns boolean language plpgsql as $$
begin
  update turns t set announced_at = clock_timestamp()
  where t.turn = p_turn and t.ended_at is not null and t.announced_at is null;
  if not towline_lock_run(p_run) then
    return false;
  end if;
  perform absurd.complete_run('turns', p_run);
  return true;
end
$$;

-- Have an attempt repeated later, or the task failed when it was the last; false when it is not this worker's any more.
create function towline_fail_turn(p_run uuid, p_reason jsonb, p_after_s double precision)
returns boolean language plpgsql as $$
begin
  if not towline_lock_run(p_run) then
    return false;
  end if;
  perform absurd.fail_run('turns', p_run, p_reason, absurd.current_time() + p_after_s * interval '1 second');
  return true;
end
$$;

-- Give an attempt back, to be gone on with at once by another worker; false when it is not this worker's any more.
create function towline_release_turn(p_run uuid) returns boolean language plpgsql as $$
begin
  if not towline_lock_run(p_run) then
    return false;
  end if;
  perform absurd.schedule_run('turns', p_run, absurd.current_time());
  perform pg_notify('towline_turns', '');
  return true;
end
$$;
