# A bash script that saves in a trap.
state=$TRAINKIT_JOB_RUN_DIR/state.$RANK
step=$(cat "$state" 2>/dev/null || echo 0)
save() { stop=1; }
trap save TERM USR2
echo "from $step"
while [ -z "$stop" ]; do
    step=$((step + 1))
    echo "step $step"
    sleep 0.1
done
sleep 0.5
echo $step > "$state"
echo "saved $step"
exit 75
