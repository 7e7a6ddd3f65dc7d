import threading

import jdistgrad as jd

done = threading.Event()


def result_of_step():
    done.wait()  # this rank's own step
    return jd.rank()


me = jd.init()
with jd.context():
    jd.on((me.rank + 1) % jd.world_size(), result_of_step)()
done.set()  # too late: the next rank waits for this one as well
jd.shutdown()
